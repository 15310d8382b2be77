import json
import random
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from eval.breakdown import accuracy, by_difficulty
from eval.measures import (
    CLASSES,
    TIERS,
    answer_literals,
    distinct_calls,
    length_quantiles,
    measure,
    opened_gold_tables,
    outcome_class,
    summarize_measures,
    tier,
)
from eval.preview import CELL_CHARACTERS, SHOWN_ROWS, preview, row_difference, shown_results
from eval.stats import wilson
from shared.sql.sandbox import BadText, QueryResult
from tests.eval.runs import record

CASES = [json.loads(line) for line in (Path(__file__).parent / "measure_cases.jsonl").read_text().splitlines()]


def result(rows: list[list[Any]] | None, columns: list[str] | None = None) -> QueryResult | None:
    if rows is None:
        return None
    names = columns or [f"c{i}" for i in range(len(rows[0]))]
    return QueryResult("ok", tuple(names), [tuple(row) for row in rows])


def scored(**case: Any) -> dict[str, Any]:
    """An episode record as a case describes it."""
    made = record("q", float(case["official"]), strict=case.get("strict", case["official"]))
    if case.get("strict", 0) is None:
        made["scores"]["strict"] = None
    made["scores"]["pred_outcome"] = case.get("pred_outcome", "ok")
    made["scores"]["official"]["reason"] = case.get("reason", "")
    pred = result(case.get("pred"), case.get("pred_columns"))
    gold = result(case.get("gold_rows"))
    made["results"] = shown_results(pred, gold)
    return made | {
        "answer_sql": case.get("answer", "SELECT a FROM t"),
        "gold_sql": case.get("gold_sql", "SELECT a FROM t"),
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["note"])
def test_outcome_classes(case: dict[str, Any]) -> None:
    made = scored(**case)
    assert outcome_class(made) == case["outcome"]
    assert tier(made) == case["tier"]


def test_every_class_has_a_case() -> None:
    assert {case["outcome"] for case in CASES} == set(CLASSES)
    assert {c.tier for c in CLASSES.values()} == set(TIERS)


def test_without_a_verdict_there_is_no_class() -> None:
    made = record("q", None)
    assert outcome_class(made) is None
    assert tier(made) is None
    assert measure(made).outcome is None


# ---- calls


def call(tool: str, outcome: str = "ok", text: str = "", **args: Any) -> dict[str, Any]:
    return {"tool": tool, "args": args, "outcome": outcome, "text": text}


def with_calls(*calls: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return record("q", 1.0, turns=[{"clean": True, "calls": list(calls)}]) | changes


GOLD = "SELECT s.name FROM Singer AS s JOIN concert AS c ON s.id = c.singer_id"


@pytest.mark.parametrize(
    ("calls", "opened"),
    [
        ([], False),
        ([call("describe_table", table_name="singer")], False),
        ([call("describe_table", table_name="singer"), call("sample_rows", table_name="CONCERT", limit=5)], True),
        ([call("describe_table", table_name="singer"), call("sample_rows", "bad_call", table_name="concert")], False),
        ([call("run_query", sql="SELECT 1 FROM singer, concert")], True),
        ([call("run_query", "sql_error", sql="SELECT 1 FROM singer, concert")], False),
        ([call("submit_sql", "submitted", sql=GOLD), call("list_tables")], False),
        ([call("join_path", table_a="singer", table_b="concert"), call("foreign_keys", table_name="singer")], False),
    ],
)
def test_opened_every_gold_table(calls: list[dict[str, Any]], opened: bool) -> None:
    assert opened_gold_tables(with_calls(*calls, gold_sql=GOLD)) is opened


@pytest.mark.parametrize("gold", ["SELECT 1", "", "SELECT FROM WHERE"])
def test_a_gold_without_tables_says_nothing_about_opening_them(gold: str) -> None:
    assert opened_gold_tables(with_calls(gold_sql=gold)) is None


def test_distinct_calls() -> None:
    same = call("describe_table", table_name="a", text="one"), call("describe_table", table_name="a", text="two")
    complaints = call("", "bad_call", "Error: bad JSON"), call("", "bad_call", "Error: another")
    assert distinct_calls(with_calls(*same, call("list_tables"), call("list_tables"), *complaints)) == 4


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t WHERE a = 'Oslo' AND b > 7 LIMIT 3", (2, 2, 0, 0)),
        ("SELECT a FROM t WHERE a = 'oslo'", (1, 0, 0, 1)),  # = minds case
        ("SELECT a FROM t WHERE a LIKE '%oSL%'", (1, 1, 0, 0)),  # LIKE doesn't
        ("SELECT a FROM t WHERE a = 'France'", (1, 0, 1, 0)),  # the question says so
        ("SELECT a FROM t WHERE a = 70 OR a = -7", (2, 1, 0, 1)),  # 7 is no part of 70
        ("SELECT strftime('%Y', a), 'x', 5 FROM t WHERE strftime('%Y', a) BETWEEN '1999' AND '2001'", (2, 0, 0, 2)),
        ("SELECT a FROM t WHERE a IN ('Oslo', 'Oslo', 'Rome')", (2, 1, 0, 1)),
        ("SELECT a FROM t WHERE a = ''", (0, 0, 0, 0)),
        ("SELECT a FROM t", (0, 0, 0, 0)),
    ],
)
def test_answer_literals(sql: str, expected: tuple[int, int, int, int]) -> None:
    calls = call("sample_rows", text="name | n\nOslo | 7"), call("run_query", "sql_error", text="Rome 1999")
    made = with_calls(*calls, call("submit_sql", "submitted", text="Rome 2001"), answer_sql=sql, question="In FRANCE?")
    literals = answer_literals(made)
    assert literals is not None
    assert (literals.total, literals.seen, literals.stated, literals.from_nowhere) == expected


@pytest.mark.parametrize("sql", [None, "", "SELECT 'a", "x" * 50_000, "\ud800"])
def test_an_answer_that_does_not_parse_has_no_literals(sql: str | None) -> None:
    made = answer_literals(with_calls(answer_sql=sql))
    assert made is None or made.total == 0


# ---- over many


def test_length_quantiles_keep_equal_lengths_together() -> None:
    lengths = [random.Random(1).choice([1, 1, 1, 5, 9, 30]) for _ in range(200)]
    records = [record(str(i), 1.0, gold_sql=" ".join(["a"] * n)) for i, n in enumerate(lengths)]
    groups = length_quantiles(records)
    assert sum(map(len, groups.values())) == 200
    for group in groups.values():
        own = {len(r["gold_sql"].split()) for r in group}
        assert all(
            n not in own
            for other in groups.values()
            if other is not group
            for n in {len(r["gold_sql"].split()) for r in other}
        )
    assert len(groups) <= 4
    assert next(iter(groups)).startswith("≤ ")


def test_length_quantiles_of_distinct_lengths_are_quarters() -> None:
    records = [record(str(n), 1.0, gold_sql=" ".join(["a"] * n)) for n in range(1, 41)]
    assert {label: len(group) for label, group in length_quantiles(records).items()} == {
        "≤ 10 tokens": 10,
        "11–20 tokens": 10,
        "21–30 tokens": 10,
        "31–40 tokens": 10,
    }
    assert length_quantiles([]) == {}


def test_summary_of_measures() -> None:
    right = with_calls(call("describe_table", table_name="t"), gold_sql="SELECT a FROM t", sampled_tokens=30)
    wrong = scored(**CASES[-2]) | {"question_id": "w", "sampled_tokens": 10}
    summary = summarize_measures([right, wrong, record("x", None)])
    assert summary["tiers"] == {"no_answer": 0, "fails": 0, "wrong": 1, "official": 0, "strict": 1}
    assert sum(summary["classes"].values()) == 2
    opened = summary["opened_gold_tables"]
    assert (opened["n"], opened["share"]) in ((2, 0.5), (1, 1.0))
    assert opened["official_if_opened"] == 1.0
    assert summary["compute"]["sampled_tokens_per_right_answer"] == 40
    assert summary["compute"]["sampled_tokens_per_question"] == 20
    assert summarize_measures([])["compute"]["sampled_tokens_per_question"] is None


@pytest.mark.parametrize(("successes", "n"), [(4, 87), (0, 10), (10, 10), (66, 129), (1, 1)])
def test_wilson_equals_scipys(successes: int, n: int) -> None:
    reference = binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(successes, n) == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_wilson_refuses_what_is_no_proportion() -> None:
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_accuracy_averages_the_samples_of_a_question() -> None:
    samples = [record("a", 1.0), record("a", 0.0, sample=1), record("b", 1.0), record("c", None)]
    row = accuracy("all", samples)
    assert row is not None
    assert (row.n, row.questions, row.official) == (3, 2, 0.75)
    assert row.low <= 0.75 <= row.high
    assert accuracy("none", [record("c", None)]) is None


def test_levels_go_from_easy_to_hard() -> None:
    records = [record(str(i), 1.0, difficulty=d) for i, d in enumerate(["challenging", "zebra", "simple", "moderate"])]
    assert list(by_difficulty(records)) == ["simple", "moderate", "challenging", "zebra"]
    assert by_difficulty([record("q", 1.0, difficulty="")]) == {}


# ---- what a record keeps of results


def test_preview_keeps_the_head_as_text() -> None:
    rows = [(None, 1, 1.5, b"\x00\xff", "x" * 500, BadText(b"M\xfc"))] * 20
    head = preview(QueryResult("ok", ("n", "i", "f", "b", "t", "bad"), rows))
    assert len(head["rows"]) == SHOWN_ROWS
    assert head["n_rows"] == 20
    assert head["rows"][0][:4] == [None, "1", "1.5", "x'00ff'"]
    assert len(head["rows"][0][4]) == CELL_CHARACTERS
    assert head["rows"][0][5] == "M\ufffd"
    json.dumps(head)


def test_row_difference_counts_distinct_rows() -> None:
    pred, gold = result([[1], [1], [5]]), result([[1], [2], [2]])
    assert pred is not None
    assert gold is not None
    assert row_difference(pred, gold) == {
        "missing": 1,
        "surplus": 1,
        "gold_distinct": 2,
        "same_bag": False,
        "gold_columns_found": False,
    }


def test_columns_are_matched_each_once() -> None:
    twice, pair = result([[1, 2], [3, 4]]), result([[1, 1], [3, 3]])
    assert twice is not None
    assert pair is not None
    assert row_difference(twice, pair)["gold_columns_found"] is False
    assert row_difference(pair, pair)["gold_columns_found"] is True


def test_failed_queries_show_nothing() -> None:
    failed = QueryResult("sql_error", message="no")
    ran = result([[1]])
    assert ran is not None
    assert shown_results(failed, ran) == {"pred": None, "gold": preview(ran), "difference": None}
    assert shown_results(None, failed) == {"pred": None, "gold": None, "difference": None}
