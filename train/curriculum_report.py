"""The pool's weight by quantile over the steps, as a table and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from shared.errors import SetupError
from train.curriculum import (
    CurriculumSettings,
    Floats,
    draw,
    expected_quantile,
    question_weights,
    weight_by_quantile,
)
from train.pool import Pool


def checkpoints_of(steps: int, settings: CurriculumSettings, rows: int = 9) -> list[int]:
    """Steps worth a row: evenly spread over the ramp (or over the run where that is shorter), and the last one."""
    end = min(settings.ramp_steps, max(steps - 1, 1)) if settings.enabled else 0
    return sorted({round(i * end / max(rows - 1, 1)) for i in range(rows)} | {max(steps - 1, 0)})


def difficulty_shares(pool: Pool, step: int, settings: CurriculumSettings, factors: Floats | None) -> dict[str, float]:
    """Share of the step's probability mass by difficulty (in lower case), by name; sums to 1."""
    weights = question_weights(pool.quantiles, step, settings, factors)
    mass = np.bincount(pool.levels.codes, weights=weights, minlength=len(pool.levels.names))
    return {pool.levels.names[i]: float(mass[i] / mass.sum()) for i in np.argsort(pool.levels.names)}


def difficulty_line(pool: Pool, steps: Sequence[int], settings: CurriculumSettings, factors: Floats | None) -> str:
    """The same at the first and at the last of `steps`, in a line."""
    first, last = (difficulty_shares(pool, step, settings, factors) for step in (steps[0], steps[-1]))
    shares = ", ".join(f"{name or '(none given)'} {first[name]:.1%} to {last[name]:.1%}" for name in first)
    return f"share of the weight by difficulty, step {steps[0]} to {steps[-1]}: {shares}"


def weight_table(
    pool: Pool, steps: Sequence[int], settings: CurriculumSettings, factors: Floats | None, n: int, seed: int
) -> Table:
    """One row a step: share of the weight in each tenth of the pool, mean quantile expected, and of the n drawn.

    With a difficulty mix (`factors` of the questions), a line below has the share by difficulty.
    """
    quantiles, lengths = pool.quantiles, pool.lengths
    caption = None if factors is None else escape(difficulty_line(pool, steps, settings, factors))
    title = f"{len(lengths):,} questions, gold length {min(lengths)} to {max(lengths)} tokens"
    table = Table(title=title, caption=caption)
    for name in ("step", *(f"{10 * i}-{10 * i + 10}%" for i in range(10)), "mean q", "drawn q", "drawn tokens"):
        table.add_column(name, justify="right")
    for step in steps:
        mass = weight_by_quantile(quantiles, step, settings, factors=factors)
        drawn = draw(quantiles, n, seed=seed, step=step, settings=settings, factors=factors)
        tokens = sum(lengths[i] for i in drawn) / n
        table.add_row(
            str(step),
            *(f"{100 * share:.1f}" for share in mass),
            f"{expected_quantile(quantiles, step, settings, factors):.3f}",
            f"{quantiles[drawn].mean():.3f}",
            f"{tokens:.1f}",
        )
    return table


def plot(
    path: Path, quantiles: Floats, steps: Sequence[int], settings: CurriculumSettings, factors: Floats | None = None
) -> None:
    """Draw the same shares as lines over the steps. SetupError without matplotlib, which is not a dependency."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    shares = [weight_by_quantile(quantiles, step, settings, factors=factors) for step in steps]
    for tenth in range(10):
        label = f"{10 * tenth}-{10 * tenth + 10}%"
        axes.plot(steps, [share[tenth] for share in shares], label=label, color=(tenth / 9, 0.3, 1 - tenth / 9))
    axes.set(xlabel="step", ylabel="share of the weight", title="weight by quantile of gold length")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
