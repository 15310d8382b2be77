"""What went wrong in other text-to-SQL evaluations, by public bug reports, held against this one.

E1 set comparison hides duplicates and order; E3 a wrong or slow gold is charged to the model (see test_gold.py for its
five golds); E5 empty equals empty; E6 wrong tests of significance, and "the same model" that is not deterministic.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.compare import compare, load_run
from eval.run import evaluate
from eval.scorers import bird
from eval.stats import mcnemar_exact, paired_bootstrap
from shared.database import Database
from shared.sql.sandbox import Limits, QueryResult, Sandbox
from tests.eval.runs import arguments, parse, record, write_questions, write_run

ANT, BEE = ("ant",), ("bee",)
# The prediction's rows, gold's, whether gold has an ORDER BY; then the verdicts: official, strict, fair.
E1 = [
    ([ANT, ANT, BEE], [ANT, BEE], True, (1, 0, 0)),
    ([BEE, ANT], [ANT, BEE], True, (1, 0, 0)),
    # Without an ORDER BY the order was SQLite's to choose: fair says so, strict (lists are equal or not) doesn't.
    ([BEE, ANT], [ANT, BEE], False, (1, 0, 1)),
    ([("x", 1)], [(1, "x")], True, (0, 0, 0)),
    ([(2,)], [(2.0,)], True, (1, 1, 1)),
    # The tolerance of fair is stated: 12 significant digits.
    ([(0.30000000000000004,)], [(0.3,)], True, (0, 0, 1)),
    ([("2",)], [(2,)], True, (0, 0, 0)),
    ([(None,)], [], True, (0, 0, 0)),
    ([(None, "a"), ("b", None), (1, None)], [(1, None), ("b", None), (None, "a")], False, (1, 0, 1)),
]


def result(rows: list[tuple[Any, ...]]) -> QueryResult:
    return QueryResult("ok", ("c",), rows)


@pytest.mark.parametrize(("pred", "gold", "ordered", "expected"), E1)
def test_e1_every_item_has_named_verdicts(
    pred: list[tuple[Any, ...]], gold: list[tuple[Any, ...]], ordered: bool, expected: tuple[int, int, int]
) -> None:
    scores = bird.score_results(result(pred), result(gold), ordered=ordered)
    assert scores.strict is not None
    assert scores.fair is not None
    assert (scores.official.score, scores.strict.score, scores.fair.score) == expected
    assert (scores.official.rule, scores.strict.rule, scores.fair.rule) == ("bird_official", "bird_strict", "bird_fair")


def test_e1_the_verdicts_of_a_run_stand_side_by_side(data: Path, tmp_path: Path) -> None:
    golds = [("shop", "SELECT name FROM item ORDER BY id", "simple"), ("shop", "SELECT name FROM item", "simple")]
    write_questions(data / "e1.json", golds)
    reversed_rows = json.dumps({"tool": "submit_sql", "args": {"sql": "SELECT name FROM item ORDER BY id DESC"}})
    more = ("--engine", "canned", "--turn", reversed_rows)
    summary = evaluate(parse(arguments(data, tmp_path / "out", *more, questions="e1.json")))
    assert (summary["official"], summary["strict"], summary["fair"]) == (1.0, 0.0, 0.5)
    assert summary["rules"] == {
        "official": "bird_official",
        "strict": "bird_strict",
        "fair": "bird_fair",
        "soft_f1": "bird_soft_f1",
    }


def test_e3_gold_as_prediction_is_run_before_any_model_and_on_record(data: Path, tmp_path: Path) -> None:
    write_questions(data / "e3.json", [("shop", "SELECT 1", "simple"), ("shop", "SELECT nope", "simple")])
    summary = evaluate(parse(arguments(data, tmp_path / "out", questions="e3.json")))
    assert (summary["n"], summary["official"], summary["gold"]["flagged"]) == (1, 1.0, {"gold_error": ["q1"]})
    assert "gold_error" in summary["gold"]["flag_rules"]
    assert "has no verdict" in summary["exclusion_rule"]


E5 = ["SELECT NULL", "SELECT ''", "SELECT 0", "SELECT 1 WHERE 0"]


def test_e5_null_blank_zero_and_nothing_are_four_results(data: Path) -> None:
    shop = Database("shop", path=data / "databases" / "shop" / "shop.sqlite")
    with Sandbox() as sandbox:
        results = [sandbox.query(shop, sql, Limits(seconds=5)) for sql in E5]
    for i, pred in enumerate(results):
        same = [bird.score_results(pred, gold, ordered=False) for gold in results]
        assert [scores.official.score for scores in same] == [float(i == j) for j in range(len(E5))]
        assert [scores.strict and scores.strict.score for scores in same] == [float(i == j) for j in range(len(E5))]


def test_e5_the_share_of_trivial_golds_is_reported_and_the_score_without_them(data: Path, tmp_path: Path) -> None:
    golds = [("shop", sql, "simple") for sql in (*E5, "SELECT name FROM item", "SELECT count(*) FROM item")]
    write_questions(data / "e5.json", golds)
    empty = json.dumps({"tool": "submit_sql", "args": {"sql": "SELECT 1 WHERE 0"}})
    more = ("--engine", "canned", "--turn", empty)
    summary = evaluate(parse(arguments(data, tmp_path / "out", *more, questions="e5.json")))
    gold = summary["gold"]
    assert gold["shape"] == {"empty": 1, "one_null": 1, "one_zero": 1, "rows": 3}
    assert (gold["share_trivial"], gold["n"]) == (0.5, 6)
    assert summary["official"] == pytest.approx(1 / 6)
    assert (gold["official_on_trivial"], gold["official_without_trivial"]) == (pytest.approx(1 / 3), 0.0)
    assert gold["official_without"] == {"gold_empty": 0.0}


def test_e5_nothing_submitted_scores_0_against_an_empty_gold(data: Path, tmp_path: Path) -> None:
    write_questions(data / "e5none.json", [("shop", "SELECT 1 WHERE 0", "simple")])
    more = ("--engine", "canned", "--turn", "no idea")
    assert evaluate(parse(arguments(data, tmp_path / "out", *more, questions="e5none.json")))["official"] == 0.0


@pytest.mark.parametrize(
    ("b", "c", "p"), [(0, 0, 1.0), (10, 10, 1.0), (1, 6, 0.125), (0, 6, 0.03125), (12, 27, 0.0237)]
)
def test_e6_mcnemar_is_exact_and_never_above_1(tmp_path: Path, b: int, c: int, p: float) -> None:
    assert mcnemar_exact(b, c) == pytest.approx(p, abs=5e-5)
    scores = [(1.0, 0.0)] * b + [(0.0, 1.0)] * c + [(1.0, 1.0)] * 10
    folders = [
        write_run(tmp_path / name, [record(f"q{i}", pair[side]) for i, pair in enumerate(scores)])
        for side, name in enumerate("ab")
    ]
    assert compare(*map(load_run, folders))["p"] == pytest.approx(p, abs=5e-5)


def test_e6_the_bootstrap_draws_questions_with_all_their_samples(tmp_path: Path) -> None:
    # Four samples that always agree are one observation: the interval must be that of one sample a question.
    once = [record(f"q{i}", float(i % 3 == 0)) for i in range(60)]
    often = [record(f"q{i}", float(i % 3 == 0), sample=k) for i in range(60) for k in range(4)]
    zero = load_run(write_run(tmp_path / "zero", [record(f"q{i}", 0.0) for i in range(60)]))
    one, four = (load_run(write_run(tmp_path / name, records)) for name, records in (("one", once), ("four", often)))
    single, sampled = compare(zero, one, seed=5), compare(zero, four, seed=5)
    assert single["ci"] == sampled["ci"]
    assert (sampled["n"], sampled["bootstrap"]["units"], sampled["bootstrap"]["seed"]) == (60, 60, 5)
    assert compare(one, four)["ci"] == [0.0, 0.0]
    # With replacement: a resample of two questions can be one question twice.
    assert paired_bootstrap([1.0, 0.0]).low == 0.0


def test_e6_a_run_at_a_temperature_reports_its_seeds(data: Path, tmp_path: Path) -> None:
    summary = evaluate(parse(arguments(data, tmp_path / "out", "--samples", "3")))
    assert summary["samples"]["k"] == summary["identity"]["samples"] == 3
    assert summary["samples"]["per_sample"] == [1.0, 1.0, 1.0]
    assert summary["samples"]["flip_rate"] == 0.0
    assert summary["identity"]["seed"] == 0
