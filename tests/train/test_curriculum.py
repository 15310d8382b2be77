"""The curriculum's formula, its purity, and its cost at full size."""

import json
import math
import sqlite3
import subprocess
import sys
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from shared.data.example import Example
from shared.database import Database
from shared.errors import SetupError
from train import curriculum
from train.curriculum import (
    CurriculumSettings,
    draw,
    drawable,
    expected_quantile,
    log_weights,
    quantile_ranks,
    weight_by_quantile,
)
from train.pool import build_pool

RECIPE = CurriculumSettings()
CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "curriculum.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[case["note"] for case in CASES])
def test_weights_by_hand(case: dict[str, object]) -> None:
    settings = CurriculumSettings(ramp_steps=case["ramp"], k=case["k"])  # type: ignore[arg-type]
    weights = np.exp(log_weights(np.array(case["q"], dtype=np.float32), case["step"], settings))  # type: ignore[arg-type]
    assert weights.tolist() == pytest.approx(case["weights"], rel=1e-6)


def test_quantile_ranks_by_hand() -> None:
    assert quantile_ranks([10, 30, 20, 20, 50]).tolist() == [0.0, 0.75, 0.375, 0.375, 1.0]
    assert quantile_ranks([7, 7, 7]).tolist() == [0.5, 0.5, 0.5]
    assert quantile_ranks([7]).tolist() == [0.5]
    assert quantile_ranks([]).tolist() == []


@given(st.lists(st.integers(1, 20), min_size=2, max_size=40))
def test_quantile_ranks_follow_the_lengths_and_nothing_else(lengths: list[int]) -> None:
    ranks = quantile_ranks(lengths)
    assert ((ranks >= 0) & (ranks <= 1)).all()
    assert ranks.mean() == pytest.approx(0.5, abs=1e-5)
    for i, a in enumerate(lengths):
        for j, b in enumerate(lengths):
            assert (a < b) == (ranks[i] < ranks[j])


def test_the_mean_quantile_rises_from_short_to_long_and_stays() -> None:
    q = quantile_ranks(np.arange(10_001))
    means = [expected_quantile(q, step, RECIPE) for step in range(0, 601, 50)]
    assert all(a < b for a, b in pairwise(means[:9]))
    assert means[8:] == [means[8]] * 5
    assert means[4] == pytest.approx(0.5, abs=1e-6)
    # Uniform q with weight exp(-2 (2q - 1)): 1/2 (1 - (coth 2 - 1/2)).
    assert means[0] == pytest.approx(0.5 * (1 - (1 / math.tanh(2) - 0.5)), abs=1e-3)
    assert means[0] + means[8] == pytest.approx(1.0, abs=1e-6)


def test_drawn_quantiles_follow_the_schedule() -> None:
    q = quantile_ranks(np.arange(20_000))
    for step in (0, 100, 200, 300, 400, 900):
        drawn = np.concatenate([q[draw(q, 18, seed=s, step=step, settings=RECIPE)] for s in range(120)])
        assert drawn.mean() == pytest.approx(expected_quantile(q, step, RECIPE), abs=0.03)


def test_first_draw_has_the_probabilities_of_the_weights() -> None:
    """Chi-square over 6,000 draws from a pool of six, at a step where the weights differ by 5 to 1."""
    q = quantile_ranks([1, 2, 3, 4, 5, 6])
    settings = CurriculumSettings(ramp_steps=10, k=1.0)
    counts = np.zeros(6)
    for seed in range(6000):
        counts[draw(q, 1, seed=seed, step=9, settings=settings)[0]] += 1
    weights = np.exp(log_weights(q, 9, settings).astype(float))
    assert chisquare(counts, 6000 * weights / weights.sum()).pvalue > 1e-4


@given(st.integers(0, 2**31), st.integers(0, 2000), st.integers(1, 30))
def test_a_draw_is_pure_distinct_and_a_prefix_of_a_larger_one(seed: int, step: int, n: int) -> None:
    q = quantile_ranks(np.arange(40) // 3)
    drawn = draw(q, n, seed=seed, step=step, settings=RECIPE)
    assert drawn.tolist() == draw(q, n, seed=seed, step=step, settings=RECIPE).tolist()
    assert len(set(drawn.tolist())) == n
    assert drawn.tolist() == draw(q, 40, seed=seed, step=step, settings=RECIPE)[:n].tolist()


def test_steps_and_seeds_draw_differently() -> None:
    q = quantile_ranks(np.arange(1000))
    draws = {tuple(draw(q, 8, seed=seed, step=step, settings=RECIPE)) for seed in range(20) for step in range(20)}
    assert len(draws) == 400


def test_disabled_and_k_zero_are_uniform() -> None:
    q = quantile_ranks(np.arange(1000))
    for settings in (CurriculumSettings(enabled=False), CurriculumSettings(k=0.0)):
        assert weight_by_quantile(q, 0, settings) == pytest.approx([0.1] * 10, abs=1e-9)


@pytest.mark.parametrize("n", [0, 6, 18])
def test_a_pool_smaller_than_the_draw_is_refused(n: int) -> None:
    with pytest.raises(SetupError, match="pool has 5 questions"):
        draw(quantile_ranks([1, 2, 3, 4, 5]), n, seed=0, step=0, settings=RECIPE)


def test_a_draw_in_another_process_is_the_same() -> None:
    """No hash seed, no global generator and no thread count may have a say."""
    code = (
        "import numpy as np; from train.curriculum import *;"
        "q = quantile_ranks(np.arange(5000) // 7);"
        "print([draw(q, 18, seed=3, step=s, settings=CurriculumSettings()).tolist() for s in (0, 13, 399, 5000)])"
    )
    q = quantile_ranks(np.arange(5000) // 7)
    here = [draw(q, 18, seed=3, step=s, settings=RECIPE).tolist() for s in (0, 13, 399, 5000)]
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(there) == here


def test_the_order_of_loading_does_not_reorder_the_pool() -> None:
    """Equal lengths are ordered by question id, so the same step draws the same ids from a shuffled file."""
    database = Database("d", path=Path("d.sqlite"))
    examples = [Example(f"q{i:03}", "d", "?", f"SELECT {'1 + ' * (i % 4)}1", database) for i in range(60)]
    shuffled = [examples[(i * 37) % 60] for i in range(60)]
    first, second = build_pool(examples), build_pool(shuffled)
    assert [e.question_id for e in first.examples] == [e.question_id for e in second.examples]
    assert first.content_hash == second.content_hash
    assert first.quantiles.tolist() == second.quantiles.tolist()


# ---- the difficulty mix

SPREAD = quantile_ranks(np.arange(2000))
THIRDS = np.arange(2000) % 3  # difficulty by position, independent of the length


def test_factors_of_one_draw_what_no_factors_draw() -> None:
    for step in (0, 13, 399):
        plain = draw(SPREAD, 18, seed=3, step=step, settings=RECIPE)
        ones = np.ones(2000, dtype=np.float32)
        assert draw(SPREAD, 18, seed=3, step=step, settings=RECIPE, factors=ones).tolist() == plain.tolist()
        assert draw(SPREAD, 18, seed=3, step=step, settings=RECIPE, factors=4 * ones).tolist() == plain.tolist()


def test_the_first_draws_follow_length_weight_times_factor() -> None:
    """Chi-square over 6,000 draws from six questions whose factors run against their length weights, one of them 0."""
    q, factors = quantile_ranks([1, 2, 3, 4, 5, 6]), np.array([3, 1, 0.5, 2, 0, 1], dtype=np.float32)
    settings = CurriculumSettings(ramp_steps=10, k=1.0)
    counts = np.zeros(6)
    for seed in range(6000):
        counts[draw(q, 1, seed=seed, step=9, settings=settings, factors=factors)[0]] += 1
    weights = np.exp(log_weights(q, 9, settings).astype(float)) * factors
    assert counts[4] == 0
    left = weights > 0
    assert chisquare(counts[left], 6000 * weights[left] / weights.sum()).pvalue > 1e-4


@given(st.integers(0, 2**31), st.integers(0, 2000), st.integers(1, 26))
def test_a_mixed_draw_is_pure_distinct_without_zeros_and_a_prefix_of_a_larger_one(seed: int, step: int, n: int) -> None:
    q = quantile_ranks(np.arange(40) // 3)
    factors = np.array([(0.0, 0.25, 3.0)[i % 3] for i in range(40)], dtype=np.float32)
    drawn = draw(q, n, seed=seed, step=step, settings=RECIPE, factors=factors)
    assert len(set(drawn.tolist())) == n
    assert all(position % 3 for position in drawn.tolist())
    whole = draw(q, drawable(q, factors), seed=seed, step=step, settings=RECIPE, factors=factors)
    assert drawn.tolist() == whole[:n].tolist()


def test_a_mix_that_leaves_too_few_is_refused() -> None:
    factors = (np.arange(20) % 2).astype(np.float32)
    with pytest.raises(SetupError, match=r"pool has 20 questions, of which curriculum\.mix leaves 10, a step draws 11"):
        draw(quantile_ranks(range(20)), 11, seed=0, step=0, settings=RECIPE, factors=factors)


def test_the_expectation_and_the_tenths_use_the_mix() -> None:
    factors = np.where(SPREAD < 0.5, np.float32(0), np.float32(1)).astype(np.float32)
    assert expected_quantile(SPREAD, 200, RECIPE, factors) == pytest.approx(0.75, abs=1e-3)
    assert weight_by_quantile(SPREAD, 200, RECIPE, factors=factors) == pytest.approx([0] * 5 + [0.2] * 5, abs=2e-3)
    mixed = np.array([1.0, 1.0, 0.5], dtype=np.float32)[THIRDS]
    drawn = np.concatenate([draw(SPREAD, 18, seed=s, step=200, settings=RECIPE, factors=mixed) for s in range(150)])
    assert np.mean(THIRDS[drawn] == 2) == pytest.approx(0.2, abs=0.04)


@pytest.mark.parametrize("mix", [False, True])
def test_full_size_pool_is_drawn_in_time_and_memory(mix: bool) -> None:
    """1.4 million questions: under 200 MB, and faster than Gumbel top-k written plainly (some 20 ms a draw)."""
    lengths = np.random.default_rng(0).integers(5, 400, 1_400_000)
    tracemalloc.start()
    q = quantile_ranks(lengths)
    factors = np.array([1, 0.5, 0], dtype=np.float32)[lengths % 3] if mix else None
    draw(q, 18, seed=0, step=0, settings=RECIPE, factors=factors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    # Beside the textbook way on the same pool and in the same minute: seconds mean nothing on a busy machine.
    ours, textbook = [], []
    for step in range(7):
        start = time.perf_counter()
        draw(q, 18, seed=1, step=step, settings=RECIPE, factors=factors)
        ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        np.argpartition(-np.random.default_rng(step).gumbel(size=len(q)), 18)[:18]
        textbook.append(time.perf_counter() - start)
    assert min(ours) < min(textbook), "a draw is faster than plain Gumbel noise and a partition"


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [
        {"db_id": "d", "question": f"q{i}", "query": f"SELECT {'1 + ' * (i // 2)}1", "difficulty": level}
        for i in range(40)
        for level in [("simple", "hard")[i % 2]]
    ]
    (tmp_path / "q.json").write_text(json.dumps(questions))
    (tmp_path / "db" / "d").mkdir(parents=True)
    with sqlite3.connect(tmp_path / "db" / "d" / "d.sqlite") as connection:
        connection.execute("CREATE TABLE t (a)")
    config = tmp_path / "c.yaml"
    config.write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: owner/name}}\n"
        f"data: {{benchmark: questions, questions: {tmp_path / 'q.json'}, databases: {tmp_path / 'db'}}}\n"
    )
    assert curriculum.main(["--config", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "40 questions" in printed
    assert "0.500" in printed
    assert "difficulty" not in printed
    assert not (tmp_path / "run").exists()
    assert curriculum.main(["--config", str(config), "curriculum.mix={Simple: 3}"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "share of the weight by difficulty, step 0 to 999: hard 25.0% to 25.0%, simple 75.0% to 75.0%" in printed
    with pytest.raises(SetupError, match="no question is 'medium'; the pool has hard, simple"):
        curriculum.main(["--config", str(config), "curriculum.mix={medium: 3}"])
