"""BIRD's execution accuracy: official, strict, mini-dev's soft F1, and a fair one, from two executed queries.

- official: the sets of rows are equal.
- strict: the lists are. Without an ORDER BY in gold that penalises an order which SQLite was free to choose.
- fair (ours): duplicates count; order counts where the gold query itself has an ORDER BY; numbers with a
  fraction agree in 12 significant digits. Official implies neither it nor is implied by it: 0.30000000000000004
  against 0.3 is fair, and officially wrong.
- soft F1: see `shared.sql.results.soft_f1`.

Upstream runs prediction and gold on ONE writable connection, so a prediction can change what gold reads
(`DELETE FROM t` against `SELECT … FROM t` is empty against empty, and scores 1). Here each query runs
alone on a read-only connection; `eval.scorers.parity` reproduces the upstream behaviour when asked.

The rules that are not row comparison (see `shared.sql.results` for that):

- A query that fails, is refused, runs out of time or breaks a limit scores 0, also when both queries
  fail alike. Upstream has no row or memory limit; where ours decides, the reason says so.
- A prediction without a statement ('', blanks, a comment) is a query with no rows: it equals an empty gold.
  No prediction at all scores 0 always.
- Text that is not UTF-8 makes the upstream fetch fail, so there even gold against itself scores 0.
  `undecodable="fail"` is that rule. `undecodable="bytes"` compares such cells by their bytes, so that a
  question whose gold returns them can be won; every other question scores the same under both.
"""

import re
from collections.abc import Sequence
from typing import Literal

from eval.scorers.base import Scores, Verdict
from shared.database import Database
from shared.errors import SetupError
from shared.sql.results import fair_equal, official_equal, soft_f1, strict_equal
from shared.sql.sandbox import BadText, Limits, QueryResult, Sandbox

UNDECODABLE_RULE = "text that is not UTF-8 is compared by its bytes (upstream scores every such question 0)"
Undecodable = Literal["fail", "bytes"]

OFFICIAL, STRICT, SOFT_F1, FAIR = "bird_official", "bird_strict", "bird_soft_f1", "bird_fair"

# Comments and what SQLite's tokenizer takes for a blank, at most one semicolon among them. Atomic, hence linear.
_BLANK = r"(?>[ \t\n\f\r\ufeff]|--[^\n]*|/\*(?s:.*?)(?:\*/|\Z))*+"
_NO_STATEMENT = re.compile(rf"{_BLANK};?{_BLANK}\Z")


def execute(sandbox: Sandbox, database: Database, sql: str, limits: Limits) -> QueryResult:
    """Run one query alone. Text without a statement is no error to the evaluators: it has no rows.

    Raises SetupError when the database cannot be used: that is nobody's wrong answer.
    """
    return execute_many(sandbox, database, [sql], limits)[0]


def execute_many(
    sandbox: Sandbox, database: Database, statements: Sequence[str], limits: Limits, *, reverse_unordered: bool = False
) -> list[QueryResult]:
    """`execute` for many queries on one database, each alone; light ones cost less than one call each."""
    run = [i for i, sql in enumerate(statements) if not _NO_STATEMENT.match(sql)]
    results = [QueryResult("ok") for _ in statements]
    found = sandbox.query_many(database, [statements[i] for i in run], limits, reverse_unordered=reverse_unordered)
    for i, result in zip(run, found, strict=True):
        if result.outcome == "setup_error":
            raise SetupError(result.message)
        results[i] = result
    return results


def has_undecodable(result: QueryResult) -> bool:
    """True when some cell of the result is text that is not valid UTF-8."""
    return any(isinstance(cell, BadText) for row in result.rows for cell in row)


def failure(result: QueryResult, undecodable: Undecodable) -> str | None:
    """Why this query has no result to compare, or None when it has one."""
    if result.outcome != "ok":
        return f"{result.outcome}: {result.message}" if result.message else result.outcome
    if result.truncated:
        return "limit: the result was cut"
    if undecodable == "fail" and has_undecodable(result):
        return "undecodable text"
    return None


def score_results(
    pred: QueryResult | None,
    gold: QueryResult,
    *,
    undecodable: Undecodable = "bytes",
    ordered: bool | None = None,
    rules: tuple[str, str, str, str] = (OFFICIAL, STRICT, SOFT_F1, FAIR),
) -> Scores:
    """Judge one executed answer (None: nothing was answered) against the executed gold.

    `ordered` says whether the gold query has an ORDER BY; unknown (None), there is no fair verdict.

    A gold that failed gives 0 as upstream does; whether such a question counts is for the caller to
    settle before it comes here (`eval.gold` takes it out of the denominator).
    """
    official, strict, soft, fair = rules
    outcome = "no_answer" if pred is None else pred.outcome
    reason = "no answer"
    if pred is not None:
        gold_failure, pred_failure = failure(gold, undecodable), failure(pred, undecodable)
        if gold_failure is None and pred_failure is None:
            same_set, same_list = official_equal(pred.rows, gold.rows), strict_equal(pred.rows, gold.rows)
            is_fair = ordered is not None and fair_equal(pred.rows, gold.rows, ordered=ordered)
            what = "list" if ordered else "multiset"
            return Scores(
                Verdict(official, float(same_set), "same set of rows" if same_set else "different sets of rows"),
                Verdict(strict, float(same_list), "same list of rows" if same_list else "different lists of rows"),
                Verdict(soft, soft_f1(pred.rows, gold.rows), "soft F1"),
                outcome,
                None
                if ordered is None
                else Verdict(fair, float(is_fair), f"same {what} of rows" if is_fair else f"different {what}s of rows"),
            )
        reason = f"gold: {gold_failure}" if gold_failure is not None else f"answer: {pred_failure}"
    zero = [Verdict(rule, 0.0, reason) for rule in rules]
    return Scores(zero[0], zero[1], zero[2], outcome, None if ordered is None else zero[3])
