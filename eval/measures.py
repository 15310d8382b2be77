"""What an episode record says beyond its verdict: how it failed, what it had looked at, what it cost.

Pure functions over records (one line of episodes.jsonl, as a mapping). Everything is read off the record; no
database is opened and no model is asked. Queries are read with sqlglot, so a query that it cannot parse has no
tables and no literals, and is left out of the measure concerned; every measure says how many it is over.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import sqlglot
from sqlglot import exp

from shared.sql.structure import MAX_CHARACTERS, gold_length, join_structure

Record = Mapping[str, Any]
Tier = Literal["no_answer", "fails", "wrong", "official", "strict"]
TIERS: tuple[Tier, ...] = ("no_answer", "fails", "wrong", "official", "strict")


@dataclass(frozen=True)
class OutcomeClass:
    """A way for a scored episode to end. `tier` is how far it came; `doc` is the rule, in words."""

    key: str
    tier: Tier
    label: str
    doc: str


CLASSES: Mapping[str, OutcomeClass] = {
    c.key: c
    for c in (
        OutcomeClass("exact", "strict", "exact", "the same list of rows as gold"),
        OutcomeClass("order", "official", "right, other order", "the same rows as gold in another order"),
        OutcomeClass("duplicates", "official", "right, duplicates", "the same set of rows, other multiplicities"),
        OutcomeClass("columns", "wrong", "wrong columns", "gold's columns in another order, or another number of them"),
        OutcomeClass("tables_missing", "wrong", "table missing", "does not read every table that gold reads"),
        OutcomeClass("tables_surplus", "wrong", "surplus table", "reads every table that gold reads, and others"),
        OutcomeClass("no_rows", "wrong", "no rows", "returns nothing where gold returns rows"),
        OutcomeClass("value", "wrong", "wrong value", "one value, as gold, but another one"),
        OutcomeClass("rows_missing", "wrong", "rows missing", "nothing but gold's rows, and not all of them"),
        OutcomeClass("rows_surplus", "wrong", "surplus rows", "all of gold's rows, and others"),
        OutcomeClass("rows_overlap", "wrong", "rows overlap", "some of gold's rows, and others"),
        OutcomeClass("rows_other", "wrong", "other rows", "none of gold's rows"),
        OutcomeClass("unknown_name", "fails", "unknown name", "the query names a table, column or function unknown"),
        OutcomeClass("syntax", "fails", "syntax error", "the query is no SQL that SQLite can read"),
        OutcomeClass("sql_error", "fails", "other error", "SQLite fails on the query for another reason"),
        OutcomeClass("refused", "fails", "refused", "the query would do more than read"),
        OutcomeClass("timeout", "fails", "timeout", "the query ran out of time"),
        OutcomeClass("limit", "fails", "too large", "the query ran out of memory, or its result is too large"),
        OutcomeClass("no_answer", "no_answer", "no answer", "the episode ended without an answer"),
    )
}

_UNKNOWN_NAME = re.compile(r"no such (?:column|table|function)|ambiguous column|has no column", re.IGNORECASE)
_SYNTAX = re.compile(r"syntax error|incomplete input|unrecognized token|one statement", re.IGNORECASE)
_LOOKS_AT_TABLE = ("describe_table", "sample_rows", "distinct_values")
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.In, exp.Between, exp.Is)
_PATTERNS = (exp.Like, exp.ILike, exp.Glob)
_WILDCARDS = re.compile(r"[%_*?]+")


@dataclass(frozen=True)
class Literals:
    """Constants that a query compares with: how many, how many of them the episode saw in a tool result, how many the
    question or its evidence states, and how many come from neither."""

    total: int
    seen: int
    stated: int
    from_nowhere: int


@dataclass(frozen=True)
class EpisodeMeasures:
    """The measures of one episode.

    `outcome` is a key of CLASSES, None without a verdict. `opened_gold_tables` is None where gold's tables cannot be
    told, `literals` where there is no answer that parses.
    """

    outcome: str | None
    gold_length: int
    calls: int
    distinct_calls: int
    opened_gold_tables: bool | None
    literals: Literals | None


def measure(record: Record) -> EpisodeMeasures:
    """All measures of an episode."""
    calls = list(_calls(record))
    return EpisodeMeasures(
        outcome=outcome_class(record),
        gold_length=gold_length(record["gold_sql"]),
        calls=len(calls),
        distinct_calls=distinct_calls(record),
        opened_gold_tables=opened_gold_tables(record),
        literals=answer_literals(record),
    )


# ---- how it ended


def outcome_class(record: Record) -> str | None:
    """The key in CLASSES of a scored episode, None of one without a verdict. The first rule that fits decides.

    Classes exclude each other. Where several things are wrong, the one nearer to the answer's shape comes first: an
    answer that holds all of gold's columns is `columns` whatever tables it reads; one that lacks a gold table is
    `tables_missing` whatever rows it returns.
    """
    scores = record["scores"]
    if record["status"] != "scored" or scores is None:
        return None
    difference = (record.get("results") or {}).get("difference")
    if scores["official"]["score"] >= 1.0:
        if scores["strict"] is None or scores["strict"]["score"] >= 1.0:
            return "exact"
        return "order" if difference is None or difference["same_bag"] else "duplicates"
    if record["answer_sql"] is None:
        return "no_answer"
    if (failed := _failure(scores["pred_outcome"], scores["official"]["reason"])) is not None:
        return failed
    return _wrong(record, difference)


def _failure(outcome: str, reason: str) -> str | None:
    if outcome == "ok":
        return "limit" if reason.startswith("answer: limit") else None
    if outcome in ("refused", "timeout", "limit", "no_answer"):
        return outcome
    if _UNKNOWN_NAME.search(reason):
        return "unknown_name"
    return "syntax" if _SYNTAX.search(reason) else "sql_error"


def _wrong(record: Record, difference: Mapping[str, Any] | None) -> str:
    """The class of an answer that ran and is wrong."""
    if difference is not None and difference["gold_columns_found"]:
        return "columns"
    answer, gold = tables_read(record["answer_sql"]), tables_read(record["gold_sql"])
    if answer is not None and gold is not None and gold - answer:
        return "tables_missing"
    if difference is None:  # result files instead of a gold query: nothing to hold the rows against
        return "tables_surplus" if answer is not None and gold is not None and answer - gold else "rows_other"
    pred_head, gold_head = record["results"]["pred"], record["results"]["gold"]
    if pred_head["n_columns"] != gold_head["n_columns"]:
        return "columns"
    if answer is not None and gold is not None and answer - gold:
        return "tables_surplus"
    if not pred_head["n_rows"]:
        return "no_rows"
    if pred_head["n_rows"] == gold_head["n_rows"] == gold_head["n_columns"] == 1:
        return "value"
    if not difference["missing"]:
        return "rows_surplus"
    if not difference["surplus"]:
        return "rows_missing"
    return "rows_overlap" if difference["missing"] < difference["gold_distinct"] else "rows_other"


def tier(record: Record) -> Tier | None:
    """How far a scored episode came: no answer, one that fails, one that runs, official right, strict right too."""
    key = outcome_class(record)
    return None if key is None else CLASSES[key].tier


# ---- what it had looked at


@lru_cache(maxsize=65_536)
def tables_read(sql: str | None) -> frozenset[str] | None:
    """The base tables of a query, lower-cased; None when it does not parse."""
    structure = join_structure(sql) if sql else None
    return None if structure is None else frozenset(structure.tables)


def opened_gold_tables(record: Record) -> bool | None:
    """Whether the episode had looked into every table that gold reads, by a call that succeeded.

    A table is opened by describe_table, sample_rows or distinct_values on it, or by a run_query that reads it.
    None when gold does not parse or reads no table.
    """
    wanted = tables_read(record["gold_sql"])
    if not wanted:
        return None
    opened: set[str] = set()
    for call in _calls(record):
        if call["outcome"] != "ok":
            continue
        if call["tool"] in _LOOKS_AT_TABLE:
            opened.add(str(call["args"].get("table_name", "")).lower())
        elif call["tool"] == "run_query":
            opened |= tables_read(call["args"].get("sql")) or frozenset()
    return wanted <= opened


def answer_literals(record: Record) -> Literals | None:
    """Where the answer's constants come from. None without an answer that parses.

    Counted are the distinct texts and numbers that the answer compares with (=, <, IN, BETWEEN, LIKE …), not formats,
    limits or what it returns, and not text in double quotes, which is a name to SQL. A text is seen when some
    successful result contains it: to the letter, for a pattern its longest piece between wildcards, without regard to
    case. A number is seen as a whole number only.
    """
    literals = _compared_literals(record["answer_sql"])
    if literals is None:
        return None
    results = "\n".join(c["text"] for c in _calls(record) if c["outcome"] == "ok" and c["tool"] != "submit_sql")
    told = f"{record['question']}\n{record['evidence']}"
    seen = {item for item in literals if _occurs(item, results)}
    stated = {item for item in literals if _occurs((item[0], "pattern" if item[1] == "text" else item[1]), told)}
    return Literals(len(literals), len(seen), len(stated), len(literals - seen - stated))


_Kind = Literal["text", "pattern", "number"]


@lru_cache(maxsize=4096)
def _compared_literals(sql: str | None) -> frozenset[tuple[str, _Kind]] | None:
    """(literal, kind) of a query; None when it does not parse."""
    if not sql or len(sql) > MAX_CHARACTERS:
        return None
    try:
        tree = sqlglot.parse_one(sql, read="sqlite")
        found = [item for node in tree.find_all(exp.Literal) if (item := _compared(node)) is not None]
    except Exception:  # sqlglot raises several kinds, RecursionError among them
        return None
    return frozenset(found)


def _compared(node: exp.Literal) -> tuple[str, _Kind] | None:
    text, parent = str(node.this), node.parent
    if isinstance(parent, exp.Neg):
        parent = parent.parent
    if isinstance(parent, _PATTERNS):
        piece = max(_WILDCARDS.split(text), key=len)
        return (piece, "pattern") if piece else None
    if isinstance(parent, _COMPARISONS) and text:
        return text, "text" if node.is_string else "number"
    return None


def _occurs(literal: tuple[str, _Kind], text: str) -> bool:
    value, kind = literal
    if kind == "number":
        return re.search(rf"(?<![\w.]){re.escape(value)}(?!\w|\.\d)", text) is not None
    return value.casefold() in text.casefold() if kind == "pattern" else value in text


# ---- what it cost


def _calls(record: Record) -> Iterable[Mapping[str, Any]]:
    return (call for turn in record["turns"] for call in turn["calls"])


def distinct_calls(record: Record) -> int:
    """How many different calls the episode made: tool and arguments, or the complaint where no call was understood."""
    return len({(c["tool"], repr(sorted(c["args"].items())), "" if c["args"] else c["text"]) for c in _calls(record)})


# ---- over many episodes


def length_quantiles(records: Sequence[Record], bins: int = 4) -> dict[str, list[Record]]:
    """The records by quantile of their gold's length in tokens, short ones first; label `≤ 12 tokens`, `13–20 tokens`.

    Bins have about the same number of records; records of one length are never split, so that there may be fewer bins.
    """
    lengths = sorted(gold_length(record["gold_sql"]) for record in records)
    if not lengths:
        return {}
    edges = sorted({lengths[min((len(lengths) * (i + 1) + bins - 1) // bins, len(lengths)) - 1] for i in range(bins)})
    groups: dict[str, list[Record]] = {}
    low = 0
    for edge in edges:
        label = f"≤ {edge} tokens" if low == 0 else f"{low}–{edge} tokens" if low < edge else f"{edge} tokens"
        groups[label] = [record for record in records if low <= gold_length(record["gold_sql"]) <= edge]
        low = edge + 1
    return groups


def summarize_measures(records: Sequence[Record]) -> dict[str, Any]:
    """The measures over all scored episodes, as JSON. Rates are None where nothing could be measured."""
    scored = [record for record in records if record["status"] == "scored"]
    measures = [measure(record) for record in scored]
    right = [record["scores"]["official"]["score"] >= 1.0 for record in scored]
    classes = Counter(m.outcome for m in measures)
    tiers = Counter(CLASSES[m.outcome].tier for m in measures if m.outcome is not None)
    opened = [
        (m.opened_gold_tables, r) for m, r in zip(measures, right, strict=True) if m.opened_gold_tables is not None
    ]
    literals = [m.literals for m in measures if m.literals is not None]
    total = sum(item.total for item in literals)
    calls = sum(m.calls for m in measures)
    sampled = sum(record["sampled_tokens"] for record in scored)
    return {
        "tiers": {key: tiers[key] for key in TIERS},
        "classes": {key: classes[key] for key in CLASSES if classes[key]},
        "opened_gold_tables": {
            "n": len(opened),
            "share": _ratio(sum(bool(o) for o, _ in opened), len(opened)),
            "official_if_opened": _ratio(sum(r for o, r in opened if o), sum(1 for o, _ in opened if o)),
            "official_if_not": _ratio(sum(r for o, r in opened if not o), sum(1 for o, _ in opened if not o)),
        },
        "answer_literals": {
            "n": total,
            "seen_in_results": _ratio(sum(item.seen for item in literals), total),
            "stated_in_question": _ratio(sum(item.stated for item in literals), total),
            "from_nowhere": _ratio(sum(item.from_nowhere for item in literals), total),
        },
        "calls": {
            "mean": _ratio(calls, len(scored)),
            "mean_distinct": _ratio(sum(m.distinct_calls for m in measures), len(scored)),
            "repeated_share": _ratio(calls - sum(m.distinct_calls for m in measures), calls),
        },
        "compute": {
            "sampled_tokens": sampled,
            "sampled_tokens_per_question": _ratio(sampled, len({record["question_id"] for record in scored})),
            "sampled_tokens_per_right_answer": _ratio(sampled, sum(right)),
            "context_tokens_per_episode": _ratio(sum(record["total_tokens"] for record in scored), len(scored)),
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def to_json(measures: EpisodeMeasures) -> dict[str, Any]:
    """Plain data, for the report."""
    return asdict(measures)
