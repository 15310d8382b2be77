"""Statistics for two models that answered the same questions.

Everything is paired on the question: the question is the unit that was sampled, so several samples of
one question are averaged before they come here, and the bootstrap draws questions (or whole databases),
never single answers. Deltas are "B minus A" throughout.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

ALPHA = 0.05
POWER = 0.80
RESAMPLES = 10_000
_CHUNK = 4_000_000  # drawn indices held at once: 32 MB


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided exact McNemar p-value for `b` questions only A got right and `c` only B got right.

    Under the null each discordant question is a fair coin: p = P(|X - n/2| >= |b - n/2|) for
    X ~ Binomial(n = b + c, 1/2). Exact, not mid-p, never above 1; 1.0 when nothing is discordant.

    >>> mcnemar_exact(0, 0), mcnemar_exact(10, 10), mcnemar_exact(1, 6)
    (1.0, 1.0, 0.125)
    """
    if b < 0 or c < 0:
        raise ValueError(f"discordant counts cannot be negative: b={b}, c={c}")
    if b + c == 0:
        return 1.0
    from scipy.stats import binomtest  # most of a second to import: only when a test is really run

    return float(binomtest(b, b + c, 0.5, alternative="two-sided").pvalue)


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a mean difference, with what it takes to reproduce it."""

    low: float
    high: float
    level: float
    resamples: int
    seed: int
    unit: str
    units: int


def paired_bootstrap(
    deltas: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of the mean of `deltas` (one B-minus-A difference a question).

    Units are drawn with replacement, as many as there are. A question's difference is drawn whole, so
    both models always see the same draw. With `clusters` (one label a question, e.g. its database) the
    unit is a cluster with all its questions, and each resample's mean is sum of deltas / number of
    questions drawn: wider, and the honest choice when one database's questions succeed or fail together.

    Same input and seed, same interval. Identical models give [0, 0]. Raises ValueError on empty input.
    """
    if len(deltas) == 0:
        raise ValueError("a bootstrap needs at least one question")
    values = np.asarray(deltas, dtype=np.float64)
    labels: Sequence[Hashable] = range(len(values)) if clusters is None else clusters
    if len(labels) != len(values):
        raise ValueError(f"{len(values)} deltas but {len(labels)} cluster labels")
    index_of = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    member = [index_of[label] for label in labels]
    sums, sizes, n = np.bincount(member, weights=values), np.bincount(member), len(index_of)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    step = max(1, _CHUNK // n)
    for start in range(0, resamples, step):
        stop = min(start + step, resamples)
        drawn = rng.integers(0, n, size=(stop - start, n))
        means[start:stop] = sums[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high), level, resamples, seed, "question" if clusters is None else "cluster", n)


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a proportion: sensible at 0, at 1 and for small n.

        (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    >>> [round(bound, 4) for bound in wilson(4, 87)]
    [0.018, 0.1123]
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"no proportion: {successes} of {n}")
    z = NormalDist().inv_cdf((1 + level) / 2)
    p = successes / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    # Exact at the ends, where rounding would leave 1e-17 or 0.9999….
    return (0.0 if successes == 0 else low, 1.0 if successes == n else high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given (Holm 1979).

    With p sorted ascending, adjusted p_(i) = max over j <= i of min(1, (m - j + 1) p_(j)). Rejecting
    where the adjusted value is <= alpha keeps the family-wise error at alpha, under any dependence.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    m = len(p_values)
    adjusted = [0.0] * m
    running = 0.0
    for rank, i in enumerate(sorted(range(m), key=lambda k: p_values[k])):
        running = max(running, min(1.0, (m - rank) * p_values[i]))
        adjusted[i] = running
    return adjusted


def minimum_detectable_effect(
    n: int, discordance: float, *, alpha: float = ALPHA, power: float = POWER
) -> float | None:
    """The smallest true |delta| that a paired test over `n` questions finds with probability `power`.

    `discordance` is the share of questions on which exactly one of the two is right. Normal
    approximation to McNemar's test (Connor 1987): delta solves

        delta sqrt(n) = z_{1-alpha/2} sqrt(psi) + z_{power} sqrt(psi - delta^2),   psi = discordance

    |delta| cannot exceed psi, so None means: at this n and discordance no difference can be shown.
    """
    if n <= 0 or not 0 < discordance <= 1:
        return None
    z_a, z_b = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    root = discordance * (n + z_b**2 - z_a**2)
    if root < 0:
        return None
    delta = (z_a * math.sqrt(n * discordance) + z_b * math.sqrt(root)) / (n + z_b**2)
    return delta if delta <= discordance else None


def smallest_significant_delta(n: int, discordant: int, *, alpha: float = ALPHA) -> float | None:
    """The smallest |b - c| / n with b + c = `discordant` whose exact McNemar p is <= `alpha`.

    None when even a one-sided split is not significant (fewer than 6 discordant questions at 0.05).
    """
    if n <= 0:
        return None
    for gap in range(discordant % 2, discordant + 1, 2):
        if mcnemar_exact((discordant - gap) // 2, (discordant + gap) // 2) <= alpha:
            return gap / n
    return None
