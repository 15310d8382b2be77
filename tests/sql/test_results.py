"""Row comparison: golden cases, the text that is no text, and properties that hold for any result."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sql.results import (
    fair_equal,
    multiset_cell_f1,
    multiset_row_f1,
    official_equal,
    set_digest,
    soft_f1,
    strict_equal,
)
from shared.sql.sandbox import BadText

CASES = [json.loads(line) for line in (Path(__file__).parent / "results_cases.jsonl").read_text().splitlines()]

floats = st.sampled_from([0.0, 1.0, 0.5, float("inf")])
cells = st.one_of(st.none(), st.integers(-3, 3), floats, st.text("ab", max_size=2))
results = st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[cells] * width), max_size=6))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["note"])
def test_golden_cases(case: dict[str, Any]) -> None:
    pred, gold = case["pred"], case["gold"]
    assert official_equal(pred, gold) is case["official"]
    assert strict_equal(pred, gold) is case["strict"]
    assert soft_f1(pred, gold) == pytest.approx(case["soft_f1"], abs=1e-9)
    assert multiset_row_f1(pred, gold) == pytest.approx(case["row_f1"], abs=1e-12)
    assert multiset_cell_f1(pred, gold) == pytest.approx(case["cell_f1"], abs=1e-12)


def test_undecodable_text_equals_itself_and_nothing_that_looks_like_it() -> None:
    raw = bytes.fromhex("4dfc6e6368656e")
    bad = [(BadText(raw),)]
    assert official_equal(bad, [(BadText(raw),)])
    assert strict_equal(bad, [(BadText(raw),)])
    assert multiset_row_f1(bad, [(BadText(raw),)]) == 1.0
    for other in ("Mnchen", "M\ufffdnchen", raw, BadText(b"M\xfdnchen")):
        assert not official_equal(bad, [(other,)])
        assert not strict_equal([(other,)], bad)
        assert soft_f1(bad, [(other,)]) == 0.0


@given(results, results)
def test_strict_implies_official_and_full_credit(pred: list[Any], gold: list[Any]) -> None:
    if strict_equal(pred, gold):
        assert official_equal(pred, gold)
        assert multiset_row_f1(pred, gold) == multiset_cell_f1(pred, gold) == 1.0
    assert official_equal(pred, gold) == official_equal(gold, pred)


@given(results, results)
def test_row_f1_is_a_symmetric_share_that_is_one_only_for_equal_multisets(pred: list[Any], gold: list[Any]) -> None:
    score = multiset_row_f1(pred, gold)
    assert 0.0 <= score <= 1.0
    assert score == multiset_row_f1(gold, pred)
    same = len(pred) == len(gold) and all(pred.count(row) == gold.count(row) for row in pred)
    assert (score == 1.0) is same


@given(results)
def test_duplicates_and_order_never_change_the_official_verdict(rows: list[Any]) -> None:
    assert official_equal(rows + rows[:1], list(reversed(rows)))


@given(results, results)
def test_digests_agree_exactly_where_the_official_rule_does(a: list[Any], b: list[Any]) -> None:
    assert (set_digest(a) == set_digest(b)) is official_equal(a, b)


def test_digests_tell_apart_what_only_looks_alike() -> None:
    kinds = [
        None,
        0,
        1,
        2**53 + 1,
        2.0**53,
        0.5,
        float("inf"),
        "",
        "0",
        "n",
        "None",
        b"",
        b"0",
        BadText(b"\xff"),
        "\ufffd",
    ]
    assert len({set_digest([(cell,)]) for cell in kinds}) == len(kinds)
    assert set_digest([(1, 0.0)]) == set_digest([(True, -0.0), (1.0, 0)])
    assert len({set_digest(rows) for rows in ([("a", "b")], [("a2:sb",)], [("a",), ("b",)], [("ab",)], [])}) == 5


@given(results, results)
def test_fair_lies_between_official_and_strict(pred: list[Any], gold: list[Any]) -> None:
    if strict_equal(pred, gold):
        assert fair_equal(pred, gold, ordered=True)
    if fair_equal(pred, gold, ordered=True):
        assert fair_equal(pred, gold, ordered=False)
    if fair_equal(pred, gold, ordered=False):
        assert official_equal(pred, gold)  # none of these numbers needs rounding


def test_fair_forgives_float_noise_and_nothing_larger() -> None:
    assert fair_equal([(0.1 + 0.2,), (2,)], [(0.3,), (2.0,)], ordered=True)
    assert fair_equal([(123456789.12000001,)], [(123456789.12,)], ordered=True)
    assert not fair_equal([(0.30000001,)], [(0.3,)], ordered=True)
    assert not fair_equal([(2**53 + 1,)], [(2.0**53,)], ordered=True)
    assert not fair_equal([(1,), (1,)], [(1,)], ordered=False)
    assert not fair_equal([(float("inf"),)], [(None,)], ordered=False)
