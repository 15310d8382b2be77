"""Compare finished runs on the same questions: `python -m eval.compare A B [C …] [--json]`.

Everything is paired on the question and reads "from A to B": b counts the questions only A got right, c
those only B got right, delta = score(B) - score(A). p is McNemar's exact two-sided test; the interval is
a paired bootstrap over questions (or over whole databases with --cluster database). Questions that
either run excluded (gold failed, harness fault) are excluded from both and counted. With more than two runs
all pairs are compared, and p is adjusted for their number (Holm).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.compare_text import render, render_matrix, verdict, verdict_name
from eval.pairing import METRICS, Pair, Run, check_comparable, load_run, pair_up, same_model
from eval.stats import (
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_bootstrap,
    smallest_significant_delta,
)
from eval.voting import flip_rate
from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError

__all__ = ["Pair", "Run", "compare", "compare_all", "compare_pairs", "load_run", "pair_up", "render", "verdict"]

STRATA = ("difficulty", "database")
_SHOWN_DIFFERENCES = (
    "mode",
    "samples",
    "prompt_sha256",
    "seed",
    "sampling",
    "budgets",
    "tool_limits",
    "limits",
    "engine",
    "engine_settings",
    "exclusion_rule",
    "versions",
)


def compare_pairs(pairs: Sequence[Pair], *, cluster: bool = False, seed: int = 0) -> dict[str, Any]:
    """All paired figures of a set of questions. SetupError when it is empty.

    With several samples a question, a question counts for b or c when one mean is above the other, which
    makes p an exact sign test over questions; with one sample it is McNemar's test.
    """
    if not pairs:
        raise SetupError("no question was scored in both runs: there is nothing to compare")
    n = len(pairs)
    b = sum(pair.a > pair.b for pair in pairs)
    c = sum(pair.b > pair.a for pair in pairs)
    deltas = [pair.b - pair.a for pair in pairs]
    interval = paired_bootstrap(deltas, clusters=[pair.db_id for pair in pairs] if cluster else None, seed=seed)
    return {
        "n": n,
        "b": b,
        "c": c,
        "p": mcnemar_exact(b, c),
        "delta": sum(deltas) / n,
        "ci": [interval.low, interval.high],
        "score_a": sum(pair.a for pair in pairs) / n,
        "score_b": sum(pair.b for pair in pairs) / n,
        "flip_rate": (b + c) / n,
        "minimum_detectable_effect": minimum_detectable_effect(n, (b + c) / n),
        "smallest_significant_delta": smallest_significant_delta(n, b + c),
        "bootstrap": {
            "level": interval.level,
            "resamples": interval.resamples,
            "seed": interval.seed,
            "unit": interval.unit,
            "units": interval.units,
        },
    }


def compare(
    a: Run,
    b: Run,
    *,
    metric: str = "official",
    cluster: bool = False,
    seed: int = 0,
    by_difficulty: bool = False,
    by_database: bool = False,
    voting: bool = False,
    noise: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The comparison of two runs, with a verdict in words. SetupError when they cannot be compared.

    The difference is held against `noise`, a `noise_floor`; by default that of these two runs.
    """
    check_comparable(a, b)
    pairs, excluded = pair_up(a, b, metric, voting=voting)
    result: dict[str, Any] = compare_pairs(pairs, cluster=cluster, seed=seed)
    result |= {
        "metric": metric,
        "rule": a.summary["rules"][metric],
        "voting": voting,
        "samples": [a.samples, b.samples],
        "excluded": excluded,
        "run_a": str(a.folder),
        "run_b": str(b.folder),
        "same_model": same_model(a, b),
        "noise": noise or noise_floor([a, b], metric, voting=voting),
        "differs": [key for key in _SHOWN_DIFFERENCES if a.identity.get(key) != b.identity.get(key)],
    }
    if by_difficulty:
        result["by_difficulty"] = _strata(pairs, lambda pair: pair.difficulty, cluster, seed)
    if by_database:
        # One database is one cluster: drawing clusters would leave nothing to draw.
        result["by_database"] = _strata(pairs, lambda pair: pair.db_id, False, seed)
    result["verdict_name"], result["verdict"] = verdict_name(result), verdict(result)
    return result


def _strata(pairs: Sequence[Pair], label: Callable[[Pair], str], cluster: bool, seed: int) -> dict[str, dict[str, Any]]:
    """The figures of each stratum, which are a family."""
    groups: dict[str, list[Pair]] = {}
    for pair in sorted(pairs, key=label):
        groups.setdefault(label(pair) or "(none)", []).append(pair)
    strata = {key: compare_pairs(group, cluster=cluster, seed=seed) for key, group in groups.items()}
    _adjust(list(strata.values()))
    return strata


def _adjust(family: Sequence[dict[str, Any]]) -> None:
    """Add Holm's adjusted p to each member of a family of comparisons."""
    for member, adjusted in zip(family, holm([member["p"] for member in family]), strict=True):
        member["p_holm"] = adjusted


def noise_floor(runs: Sequence[Run], metric: str = "official", *, voting: bool = False) -> dict[str, Any] | None:
    """How many questions flip when nothing but the seed changes: the most that these runs show, and where. None when
    no run has several samples and no two are of one model. Samples say nothing about votes."""
    found: list[tuple[float, str]] = []
    for run in runs:
        rate = None if voting else flip_rate(list(run.episodes.values()), metric)
        if rate is not None:
            found.append((rate, f"the samples of {run.folder}"))
    for i, one in enumerate(runs):
        for other in runs[i + 1 :]:
            if same_model(one, other):
                check_comparable(one, other)
                pairs, _ = pair_up(one, other, metric, voting=voting)
                rate = sum(pair.a != pair.b for pair in pairs) / len(pairs) if pairs else 0.0
                found.append((rate, f"{one.folder} against {other.folder}"))
    return None if not found else dict(zip(("flip_rate", "seen_in"), max(found), strict=True))


def compare_all(runs: Sequence[Run], **options: Any) -> dict[str, Any]:
    """Every pair of the runs, A number `i` and B number `j` of them; `options` are those of `compare`.

    SetupError when any two cannot be compared. The pairs are one family: each gets Holm's `p_holm`, and its verdict
    goes by that. So are all strata of all pairs.
    """
    if options.get("noise") is None:
        options["noise"] = noise_floor(runs, options.get("metric", "official"), voting=options.get("voting", False))
    pairs = []
    for i, a in enumerate(runs):
        for j, b in enumerate(runs[i + 1 :], i + 1):
            pairs.append({"i": i, "j": j, **compare(a, b, **options)})
    _adjust(pairs)
    for stratum in ("by_difficulty", "by_database"):
        _adjust([figures for pair in pairs for figures in pair.get(stratum, {}).values()])
    for pair in pairs:
        pair["verdict_name"], pair["verdict"] = verdict_name(pair), verdict(pair)
    return {
        "runs": [str(run.folder) for run in runs],
        "metric": pairs[0]["metric"],
        "rule": pairs[0]["rule"],
        "family": len(pairs),
        "noise": pairs[0]["noise"],
        "pairs": pairs,
    }


def main() -> int:
    """The command line."""
    parser = ArgumentParser(prog="python -m eval.compare", description="Compare finished runs, paired by question.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders of eval.run, two or more")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--metric", choices=METRICS, default="official", help="which verdict is compared")
    parser.add_argument("--vote", action="store_true", help="compare the votes of runs with several samples")
    parser.add_argument("--cluster", choices=("database",), help="draw whole databases in the bootstrap")
    parser.add_argument("--by", choices=STRATA, action="append", help="compare each stratum too (repeatable)")
    parser.add_argument("--noise", type=Path, action="append", metavar="RUN", help="a second run of one of the models")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    arguments = parser.parse_args()
    if len(arguments.runs) < 2:
        raise SetupError("a comparison takes two runs or more: name the output folders of eval.run")
    runs = [load_run(folder) for folder in arguments.runs]
    strata = arguments.by or []
    others = [load_run(folder) for folder in arguments.noise or []]
    options: dict[str, Any] = {
        "metric": arguments.metric,
        "cluster": arguments.cluster is not None,
        "seed": arguments.seed,
        "by_difficulty": "difficulty" in strata,
        "by_database": "database" in strata,
        "voting": arguments.vote,
        "noise": noise_floor([*runs, *others], arguments.metric, voting=arguments.vote),
    }
    result = compare(runs[0], runs[1], **options) if len(runs) == 2 else compare_all(runs, **options)
    text = render(result) if len(runs) == 2 else render_matrix(result)
    print(json.dumps(result, indent=2) if arguments.json else text)
    return 0


if __name__ == "__main__":
    run_main(main)
