"""Rewards against hand-computed groups, and the traps."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sql.structure import join_structure
from train.config import RewardConfig
from train.reward import Candidate, Gold, has_signal, majority_result, score_group

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "reward.jsonl").read_text().splitlines()]


def _rows(value: Any) -> Any:
    return None if value is None else [tuple(row) for row in value]


@pytest.mark.parametrize("case", CASES, ids=[case["note"] for case in CASES])
def test_groups_by_hand(case: dict[str, Any]) -> None:
    gold = Gold(_rows(case["gold_rows"]), join_structure(case["gold"]))
    config = RewardConfig(**case.get("config", {}))
    scores = score_group([Candidate(sql, _rows(rows)) for sql, rows in case["candidates"]], gold, config)
    assert [score.reward for score in scores] == pytest.approx(case["rewards"], abs=1e-12)
    assert [score.tier for score in scores] == case["tiers"]
    if "signal" in case:
        assert has_signal(scores, config.group_filter) is case["signal"]
    for score in scores:
        assert score.reward == pytest.approx((3.0 if score.exact else score.partial) + score.join + score.majority)


MAJORITY = [
    # results of the group (None = failed), the majority's rows or None
    ([[(1,)], [(1,)], [(2,)]], [(1,)]),
    ([[(1,)], [(1,), (1,)], [(2,)]], [(1,)]),  # as sets of rows
    ([[(1,)], [(2,)], [(3,)]], None),  # nobody agrees
    ([[(1,)], [(1,)], [(2,)], [(2,)]], None),  # a tie
    ([None, None, None, [(1,)]], None),  # failures do not vote
    ([None, [(1,)], [(1,)]], [(1,)]),
    ([[], [], [(1,)]], []),
    ([], None),
]


@pytest.mark.parametrize(("results", "expected"), MAJORITY)
def test_majority(results: list[Any], expected: list[Any] | None) -> None:
    assert majority_result(results) == (None if expected is None else frozenset(expected))


_cells = st.sampled_from([0, 1, 2.5, "a", "", None, b"x"])
_results = st.none() | st.lists(st.tuples(_cells, _cells), max_size=4)


@given(st.lists(_results, min_size=1, max_size=8), st.lists(st.tuples(_cells, _cells), max_size=4), st.booleans())
def test_no_wrong_query_ranks_above_a_right_one(results: list[Any], gold_rows: list[Any], gate: bool) -> None:
    gold = Gold(gold_rows, join_structure("SELECT a, b FROM t"))
    candidates = [Candidate("SELECT a, b FROM t", rows) for rows in results]
    scores = score_group(candidates, gold, RewardConfig(gate_bonuses=gate))
    right = [score.reward for score in scores if score.exact]
    wrong = [score.reward for score in scores if not score.exact]
    assert min(right, default=3.0) >= 3.0
    assert max(wrong, default=0.0) <= 1.1
    assert all(score.reward == 0 for score, rows in zip(scores, results, strict=True) if rows is None)
    if gate and not right:
        assert all(score.join == score.majority == 0 for score in scores)


def test_a_reward_that_could_rank_wrong_above_right_is_refused() -> None:
    with pytest.raises(ValueError, match="no wrong query above a right one"):
        RewardConfig(partial=2.9)
