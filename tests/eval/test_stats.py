"""The statistics against published values, brute force and their own definitions."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import (
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_bootstrap,
    smallest_significant_delta,
)

DELTAS = [1.0] * 12 + [-1.0] * 5 + [0.0] * 33


@pytest.mark.parametrize(
    ("b", "c", "p"), [(0, 0, 1.0), (10, 10, 1.0), (1, 6, 0.125), (0, 6, 0.03125), (12, 27, 0.0237), (27, 12, 0.0237)]
)
def test_mcnemar_known_values(b: int, c: int, p: float) -> None:
    assert mcnemar_exact(b, c) == pytest.approx(p, abs=5e-5)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_two_sided_binomial_tail(b: int, c: int) -> None:
    n = b + c
    tail = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(b - c)) / 2**n
    assert mcnemar_exact(b, c) == pytest.approx(min(1.0, tail), rel=1e-9)


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="negative"):
        mcnemar_exact(-1, 3)


def test_bootstrap_is_reproducible_and_brackets_the_mean() -> None:
    mean = sum(DELTAS) / len(DELTAS)
    interval = paired_bootstrap(DELTAS, seed=7)
    assert interval == paired_bootstrap(DELTAS, seed=7)
    assert interval != paired_bootstrap(DELTAS, seed=8)
    assert interval.low < mean < interval.high
    assert (interval.unit, interval.units, interval.seed) == ("question", 50, 7)


def test_identical_models_have_an_interval_of_zero_width() -> None:
    interval = paired_bootstrap([0.0] * 30)
    assert (interval.low, interval.high) == (0.0, 0.0)


def test_bootstrap_draws_with_replacement_as_a_normal_approximation_demands() -> None:
    n, mean = len(DELTAS), sum(DELTAS) / len(DELTAS)
    error = math.sqrt(sum((d - mean) ** 2 for d in DELTAS) / n / n)
    interval = paired_bootstrap(DELTAS, resamples=20_000)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * error, rel=0.05)


def test_clusters_that_move_together_widen_the_interval() -> None:
    deltas = [1.0] * 20 + [0.0] * 20 + [-1.0] * 10 + [0.0] * 50
    databases = [f"db{i // 10}" for i in range(100)]
    alone, together = paired_bootstrap(deltas), paired_bootstrap(deltas, clusters=databases)
    assert together.high - together.low > 2 * (alone.high - alone.low)
    assert (together.unit, together.units) == ("cluster", 10)


def test_one_question_a_cluster_is_the_plain_bootstrap() -> None:
    plain, single = paired_bootstrap(DELTAS), paired_bootstrap(DELTAS, clusters=list(range(len(DELTAS))))
    assert (plain.low, plain.high) == (single.low, single.high)


def test_unequal_clusters_are_weighted_by_their_questions() -> None:
    interval = paired_bootstrap([1.0] * 9 + [0.0], clusters=["big"] * 9 + ["small"])
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_bootstrap_refuses_what_it_cannot_resample() -> None:
    with pytest.raises(ValueError, match="at least one"):
        paired_bootstrap([])
    with pytest.raises(ValueError, match="labels"):
        paired_bootstrap([1.0, 0.0], clusters=["a"])


def test_holm_known_values() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_only_raises_p_and_keeps_their_order(ps: list[float]) -> None:
    adjusted = holm(ps)
    assert all(p <= a <= 1 for p, a in zip(ps, adjusted, strict=True))
    assert all(adjusted[i] <= adjusted[j] for i in range(len(ps)) for j in range(len(ps)) if ps[i] <= ps[j])


@pytest.mark.parametrize(("n", "discordance"), [(145, 0.2), (300, 0.35), (1534, 0.1)])
def test_the_detectable_effect_is_found_with_the_power_it_promises(n: int, discordance: float) -> None:
    delta = minimum_detectable_effect(n, discordance)
    assert delta is not None
    rng, found, rounds = random.Random(5), 0, 1500
    for _ in range(rounds):
        d = sum(rng.random() < discordance for _ in range(n))
        c = sum(rng.random() < (discordance + delta) / (2 * discordance) for _ in range(d))
        found += mcnemar_exact(d - c, c) < 0.05
    assert found / rounds == pytest.approx(0.8, abs=0.07)


def test_no_effect_is_detectable_without_disagreement() -> None:
    assert minimum_detectable_effect(100, 0.0) is None
    assert minimum_detectable_effect(5, 0.2) is None
    assert minimum_detectable_effect(0, 0.5) is None


def test_smallest_significant_delta_is_the_first_split_below_alpha() -> None:
    assert smallest_significant_delta(100, 5) is None
    assert smallest_significant_delta(100, 6) == pytest.approx(0.06)
    delta = smallest_significant_delta(145, 39)
    assert delta == pytest.approx(15 / 145)
    assert mcnemar_exact(12, 27) <= 0.05 < mcnemar_exact(13, 26)
