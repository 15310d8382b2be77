"""Which questions a step sees: the length curriculum.

q in [0, 1] is the quantile rank of a question's gold-query length within the pool. At step t (from 0),

    p = min(t / ramp_steps, 1)          weight(q) ∝ exp( k (2p - 1)(2q - 1) )

short first, flat half-way, long at the end. With a difficulty mix, that weight is multiplied by the factor of the
question's difficulty. A step's questions are drawn without replacement with these weights by Gumbel top-k, as
a pure function of (seed, step): a resumed run sees the same questions, every rank draws the same list, and
nothing needs saving.

    python -m train.curriculum --config configs/grpo_curriculum.yaml [--plot FILE.png]
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError
from shared.files import check_output

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class CurriculumSettings:
    """`k` 0 (or `enabled` false) gives every question the same weight at every step."""

    enabled: bool = True
    ramp_steps: int = 400
    k: float = 2.0


def quantile_ranks(lengths: Sequence[int] | NDArray[np.int64]) -> Floats:
    """Quantile rank of each length in its pool, in [0, 1].

    Equal lengths share the mean of the ranks they cover, so a rank depends on the lengths alone and not on
    the order of the pool: q = (mean rank - 1) / (n - 1). A pool of one question has q = 0.5.

    >>> quantile_ranks([10, 30, 20, 20, 50]).tolist()
    [0.0, 0.75, 0.375, 0.375, 1.0]
    """
    array = np.asarray(lengths)
    if array.size < 2:
        return np.full(array.size, 0.5, dtype=np.float32)
    return ((rankdata(array, method="average") - 1.0) / (array.size - 1)).astype(np.float32)


def progress(step: int, settings: CurriculumSettings) -> float:
    """p = min(step / ramp_steps, 1); step counts from 0."""
    if settings.ramp_steps <= 0:
        return 1.0
    return min(step / settings.ramp_steps, 1.0)


def log_weights(quantiles: Floats, step: int, settings: CurriculumSettings) -> Floats:
    """k (2p - 1)(2q - 1) for each question: the logarithm of its unnormalized weight at this step."""
    if not settings.enabled:
        return np.zeros_like(quantiles)
    slope = settings.k * (2.0 * progress(step, settings) - 1.0)
    return (np.float32(2.0 * slope) * quantiles - np.float32(slope)).astype(np.float32, copy=False)


def drawable(quantiles: Floats, factors: Floats | None = None) -> int:
    """How many questions of the pool can be drawn: all, but for those whose factor is 0."""
    return quantiles.shape[0] if factors is None else int(np.count_nonzero(factors))


def draw(
    quantiles: Floats,
    n: int,
    *,
    seed: int,
    step: int,
    settings: CurriculumSettings,
    factors: Floats | None = None,
) -> NDArray[np.int64]:
    """Positions of the `n` questions of this step, in order of decreasing Gumbel-perturbed weight.

    `factors` (one a question, 0 or more; None: all 1) multiply the weights; a question with factor 0 is never drawn.

    Adding independent Gumbel noise g to the log-weights and keeping the n largest draws without
    replacement, proportionally to the weights. With e standard exponential, g = -log e, and the order of
    log w - log e is the reverse order of e / w: one multiplication in place of two logarithms a question.
    The first m of n drawn are what a draw of m would give, so taking more and skipping some is a refill.

    Raises SetupError when the pool (without factors of 0) is smaller than n.
    """
    size, left = quantiles.shape[0], drawable(quantiles, factors)
    if not 0 < n <= left:
        of = "" if left == size else f" of which curriculum.mix leaves {left},"
        raise SetupError(f"the pool has {size} questions,{of} a step draws {n}: lower rollout.questions or add data")
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, step])))
    keys: Floats = np.asarray(generator.standard_exponential(size, dtype=np.float32))
    keys *= np.exp(-log_weights(quantiles, step, settings))
    if factors is not None:
        keys = np.divide(keys, factors, out=np.full_like(keys, np.inf), where=factors > 0)
    # Ties of float32 keys go to the lower position: partition first, then sort the few by (key, position).
    threshold = np.partition(keys, n - 1)[n - 1]
    candidates = np.flatnonzero(keys <= threshold)
    if factors is not None:
        candidates = candidates[factors[candidates] > 0]
    order = np.lexsort((candidates, keys[candidates]))
    return candidates[order][:n].astype(np.int64)


def question_weights(
    quantiles: Floats, step: int, settings: CurriculumSettings, factors: Floats | None = None
) -> NDArray[np.float64]:
    """Unnormalized weight of each question at this step, by length and (`factors`) by difficulty."""
    weights = np.exp(log_weights(quantiles, step, settings).astype(np.float64))
    return weights if factors is None else weights * factors


def weight_by_quantile(
    quantiles: Floats, step: int, settings: CurriculumSettings, bins: int = 10, *, factors: Floats | None = None
) -> NDArray[np.float64]:
    """Share of the step's probability mass in each of `bins` equal quantile ranges; sums to 1."""
    weights = question_weights(quantiles, step, settings, factors)
    index = np.minimum((quantiles * bins).astype(np.int64), bins - 1)
    mass = np.bincount(index, weights=weights, minlength=bins)
    return np.asarray(mass / mass.sum())


def expected_quantile(
    quantiles: Floats, step: int, settings: CurriculumSettings, factors: Floats | None = None
) -> float:
    """Mean quantile of the step's distribution (of the first draw)."""
    weights = question_weights(quantiles, step, settings, factors)
    return float((weights * quantiles).sum() / weights.sum())


def main(argv: list[str] | None = None) -> int:
    """Print (and with --plot draw) how a config's pool is weighted over the steps."""
    # Imported here: the formulas above need neither the data loaders nor the config.
    from rich.console import Console

    from train.config import load_train_config
    from train.curriculum_report import checkpoints_of, plot, weight_table
    from train.pool import check_draws, load_pool

    parser = ArgumentParser(prog="python -m train.curriculum", description=main.__doc__)
    parser.add_argument("--config", type=Path, required=True, help="a YAML file; see configs/")
    parser.add_argument("--plot", type=Path, help="write a picture there")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args(argv)
    if arguments.plot is not None:
        check_output(arguments.plot, "--plot")
        if arguments.plot.suffix not in (".png", ".svg", ".pdf"):
            raise SetupError(f"--plot {arguments.plot}: give a file that ends in .png, .svg or .pdf")
    config = load_train_config(arguments.config, arguments.overrides)
    settings = CurriculumSettings(config.curriculum.enabled, config.curriculum.ramp_steps, config.curriculum.k)
    with tempfile.TemporaryDirectory() as scratch:
        pool = load_pool(config.data, Path(scratch), config.seed)
    factors = check_draws(pool, config.curriculum.mix, 1)
    n = min(config.rollout.questions, drawable(pool.quantiles, factors))
    steps = checkpoints_of(config.steps, settings)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(weight_table(pool, steps, settings, factors, n, config.seed))
    if arguments.plot is not None:
        plot(arguments.plot, pool.quantiles, steps, settings, factors)
    return 0


if __name__ == "__main__":
    run_main(main)
