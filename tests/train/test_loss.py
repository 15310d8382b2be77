"""The objective against numbers computed by hand, and its invariances."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from train.batch import TrainRow, collate, plan_micro_batches
from train.loss import (
    KlSettings,
    LossOutput,
    LossSettings,
    group_advantages,
    grpo_loss,
    k3,
    next_kl_coefficient,
    sequence_log_ratio,
)

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "loss.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["note"] for case in CASES])
def test_hand_computed(case: dict[str, Any]) -> None:
    logprobs = torch.tensor(case["logprobs"], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(case["reference"], dtype=torch.float64) if "reference" in case else None
    output = grpo_loss(
        logprobs,
        torch.tensor(case["sampler"], dtype=torch.float64),
        torch.tensor(case["mask"], dtype=torch.bool),
        torch.tensor(case["advantages"], dtype=torch.float64),
        case["n_episodes"],
        reference_logprobs=reference,
        kl_coefficient=case.get("beta", 0.0),
        settings=LossSettings(token_constant=case.get("constant", 1024.0), use_ratio=case.get("use_ratio", True)),
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(case["loss"], rel=1e-12, abs=1e-15)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [pytest.approx(row, rel=1e-12, abs=1e-15) for row in case["gradient"]]
    assert output.clipped.tolist() == case["clipped"]


ADVANTAGES = [
    ([3.0, 0.0, 0.0, 1.0], [2.0, -1.0, -1.0, 0.0]),
    ([0.0] * 8, [0.0] * 8),
    ([0.1] * 3, [0.0] * 3),
    ([3.2, 3.0], [0.1, -0.1]),
    ([5.0], [0.0]),
    ([], []),
]


@pytest.mark.parametrize(("rewards", "expected"), ADVANTAGES)
def test_group_advantages(rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(rewards) == pytest.approx(expected, abs=1e-15)
    if len(set(rewards)) <= 1:
        assert group_advantages(rewards) == expected  # exactly zero: the filter may rely on it


def test_a_one_sided_rounding_does_not_grow_with_length_and_tool_tokens_stay_out() -> None:
    """+0.001 on 4,000 sampled tokens, +5 on the tool tokens: a product over tokens would give 54.6."""
    mask = torch.ones(1, 4500, dtype=torch.bool)
    mask[0, 2000:2500] = False
    sampler = torch.full((1, 4500), -2.0, dtype=torch.float64)
    logprobs = sampler + torch.where(
        mask, torch.tensor(0.001, dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64)
    )
    ratio = sequence_log_ratio(logprobs, sampler, mask).exp().item()
    assert ratio == pytest.approx(math.exp(0.001), rel=1e-9)
    output = grpo_loss(logprobs, sampler, mask, torch.tensor([1.0], dtype=torch.float64), 1)
    assert not output.clipped.item()
    assert output.loss.item() == pytest.approx(-4000 * math.exp(0.001) / 1024, rel=1e-9)
    assert output.gap_max.item() == pytest.approx(0.001, rel=1e-9)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_positions_may_hold_anything(garbage: float) -> None:
    mask = torch.tensor([[False, True, True, False]])
    clean = torch.tensor([[0.0, -1.0, -2.0, 0.0]])
    dirty = torch.where(mask, clean, torch.full_like(clean, garbage)).requires_grad_(True)
    output = grpo_loss(
        dirty, torch.zeros(1, 4), mask, torch.tensor([1.0]), 1, reference_logprobs=clean * 0.9, kl_coefficient=0.1
    )
    expected = grpo_loss(
        clean, torch.zeros(1, 4), mask, torch.tensor([1.0]), 1, reference_logprobs=clean * 0.9, kl_coefficient=0.1
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert dirty.grad is not None
    assert dirty.grad[~mask].eq(0).all()
    assert dirty.grad.isfinite().all()


def test_an_episode_without_sampled_tokens_weighs_nothing() -> None:
    logprobs = torch.randn(2, 5, requires_grad=True)
    mask = torch.tensor([[True] * 5, [False] * 5])
    output = grpo_loss(logprobs, torch.randn(2, 5), mask, torch.tensor([0.5, 9.0]), 2)
    output.loss.backward()
    assert output.loss.isfinite()
    assert output.log_ratio[1] == 0
    assert logprobs.grad is not None
    assert logprobs.grad[1].eq(0).all()


def test_no_episodes_is_refused() -> None:
    with pytest.raises(ValueError, match="usable"):
        grpo_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), torch.zeros(1), 0)


@given(st.floats(-20, 20), st.floats(-20, 20))
def test_k3_is_never_negative_and_zero_only_at_equality(a: float, b: float) -> None:
    value = k3(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)).item()
    assert value >= 0
    assert a != b or value == 0


def _episodes(n: int, seed: int) -> list[TrainRow]:
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        length = rng.randint(3, 60)
        mask = [0] + [int(rng.random() < 0.6) for _ in range(length - 1)]
        logprobs = [rng.uniform(-3, 0) if m else 0.0 for m in mask]
        rows.append(TrainRow(list(range(length)), mask, logprobs, rng.uniform(-2, 2)))
    return rows


def _total(rows: list[TrainRow], groups: list[list[int]]) -> tuple[float, dict[int, list[float]]]:
    """Loss summed over micro-batches, and the gradient of each row's log-probabilities, by row."""
    loss, gradients = 0.0, {}
    for indices in groups:
        batch = collate([rows[i] for i in indices])
        shift = torch.sin(torch.arange(batch.ids.shape[1], dtype=torch.float64))[None] * 0.3
        logprobs = (batch.sampler_logprobs.double() + shift).requires_grad_(True)
        output: LossOutput = grpo_loss(
            logprobs,
            batch.sampler_logprobs.double(),
            batch.mask,
            batch.advantages.double(),
            len(rows),
            reference_logprobs=batch.sampler_logprobs.double(),
            kl_coefficient=0.05,
        )
        output.loss.backward()
        loss += output.loss.item()
        assert logprobs.grad is not None
        for b, i in enumerate(indices):
            gradients[i] = logprobs.grad[b, : len(rows[i].ids)].tolist()
            assert not logprobs.grad[b, len(rows[i].ids) :].any()
    return loss, gradients


@given(st.integers(0, 10_000), st.integers(1, 400))
def test_micro_batch_split_padding_and_order_change_nothing(seed: int, budget: int) -> None:
    rows = _episodes(9, seed)
    whole_loss, whole = _total(rows, [list(range(9))])
    order = random.Random(seed).sample(range(9), 9)
    one_by_one, singles = _total(rows, [[i] for i in order])
    split, by_budget = _total(rows, plan_micro_batches([len(row.ids) for row in rows], budget))
    for loss, gradients in ((one_by_one, singles), (split, by_budget)):
        assert loss == pytest.approx(whole_loss, rel=1e-10, abs=1e-14)
        for i in range(9):
            assert gradients[i] == pytest.approx(whole[i], rel=1e-10, abs=1e-14)


@given(st.lists(st.integers(1, 500), max_size=60), st.integers(1, 1000))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    groups = plan_micro_batches(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or longest * len(group) <= budget


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 60), st.integers(0, 20))
def test_micro_batches_waste_as_little_as_any_cut_of_the_sorted_rows(
    lengths: list[int], budget: int, overhead: int
) -> None:
    def cost(groups: list[list[int]]) -> int:
        return sum(len(group) * max(group) + overhead for group in groups)

    ordered = sorted(lengths, reverse=True)
    best = math.inf
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        groups = [[ordered[0]]]
        for cut, length in zip(cuts, ordered[1:], strict=True):
            if cut:
                groups.append([])
            groups[-1].append(length)
        if all(len(group) == 1 or len(group) * group[0] <= budget for group in groups):
            best = min(best, cost(groups))
    plan = [[lengths[i] for i in group] for group in plan_micro_batches(lengths, budget, overhead)]
    assert cost(plan) == best
    assert [length for group in plan for length in group] == ordered


def test_unequal_row_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="unequal lengths"):
        TrainRow([1, 2], [1], [0.0, 0.0], 0.0)


CONTROLLER = [
    # mode, beta, measured, expected
    ("adaptive", 0.02, 0.005, 0.02),  # on target
    ("adaptive", 0.02, 0.0055, 0.02 * 1.01),  # 10% above: +1%
    ("adaptive", 0.02, 0.05, 0.02 * 1.02),  # far above: capped at +2%
    ("adaptive", 0.02, 0.0, 0.02 * 0.98),  # far below: capped at -2%
    ("adaptive", 1e-4, 0.0, 1e-4),  # at the floor
    ("adaptive", 1.0, 1.0, 1.0),  # at the ceiling
    ("adaptive", 0.02, math.nan, 0.02),
    ("fixed", 0.02, 0.5, 0.02),
    ("off", 0.0, 0.5, 0.0),
]


@pytest.mark.parametrize(("mode", "beta", "measured", "expected"), CONTROLLER)
def test_kl_controller(mode: str, beta: float, measured: float, expected: float) -> None:
    assert next_kl_coefficient(beta, measured, KlSettings(mode=mode)) == pytest.approx(expected, rel=1e-12)


def test_kl_controller_settles_on_the_target() -> None:
    """A policy whose KL is inversely proportional to beta is brought to the target and kept there."""
    settings, beta = KlSettings(), 0.02
    for _ in range(400):
        beta = next_kl_coefficient(beta, 0.0005 / beta, settings)
    assert 0.0005 / beta == pytest.approx(settings.target, rel=0.02)
