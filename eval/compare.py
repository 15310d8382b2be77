"""Compare two finished runs on the same questions: `python -m eval.compare A B [--json]`.

Everything is paired on the question and reads "from A to B": b counts the questions only A got right, c
those only B got right, delta = score(B) - score(A). p is McNemar's exact two-sided test; the interval is
a paired bootstrap over questions (or over whole databases with --cluster database). Questions that
either run excluded (gold failed, harness fault) are excluded from both and counted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.records import EPISODES, SUMMARY, Key, episode_key, read_episodes, read_json
from eval.stats import (
    ALPHA,
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_bootstrap,
    smallest_significant_delta,
)
from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError

METRICS = ("official", "strict")
_SHOWN_DIFFERENCES = ("mode", "prompt_sha256", "seed", "sampling", "budgets", "limits", "engine", "versions")


@dataclass(frozen=True)
class Run:
    """A finished run as comparison needs it. Episodes by (question_id, sample)."""

    folder: Path
    summary: dict[str, Any]
    episodes: dict[Key, dict[str, Any]]

    @property
    def identity(self) -> Mapping[str, Any]:
        """What the run is."""
        identity: Mapping[str, Any] = self.summary["identity"]
        return identity


@dataclass(frozen=True)
class Pair:
    """One question of both runs: mean score over its samples in each, its stratum labels."""

    question_id: str
    db_id: str
    difficulty: str
    a: float
    b: float


def load_run(folder: Path) -> Run:
    """Read a run folder. SetupError when it is no finished run."""
    if not folder.is_dir():
        raise SetupError(f"run {folder} does not exist: give the --out folder of a finished eval.run")
    if not (folder / SUMMARY).is_file() and (folder / EPISODES).is_file():
        raise SetupError(f"run {folder} is not finished: run its eval.run command again to resume it")
    summary = read_json(folder / SUMMARY)
    return Run(folder, summary, {episode_key(record): record for record in read_episodes(folder / EPISODES)})


def check_comparable(a: Run, b: Run) -> None:
    """SetupError unless both runs answered the same questions over the same data under the same rules."""
    if a.episodes.keys() != b.episodes.keys():
        only_a, only_b = sorted(a.episodes.keys() - b.episodes.keys()), sorted(b.episodes.keys() - a.episodes.keys())
        example = (only_a or only_b)[0][0]
        raise SetupError(
            f"the runs answered different questions ({len(only_a)} only in {a.folder}, "
            f"{len(only_b)} only in {b.folder}, {example} for one): evaluate both on the same set"
        )
    if a.identity["data_sha256"] != b.identity["data_sha256"]:
        raise SetupError(
            f"the runs saw different data (hash {a.identity['data_sha256'][:12]} in {a.folder}, "
            f"{b.identity['data_sha256'][:12]} in {b.folder}): questions or databases changed, evaluate both again"
        )
    if a.summary["rules"] != b.summary["rules"]:
        raise SetupError(f"the runs were scored by different rules: {a.summary['rules']} and {b.summary['rules']}")


def pair_up(a: Run, b: Run, metric: str) -> tuple[list[Pair], int]:
    """The questions that both runs scored, in A's order, and how many were left out."""
    usable: dict[str, list[Key]] = {}
    questions = {key[0] for key in a.episodes}
    for key, record in a.episodes.items():
        if record["status"] == b.episodes[key]["status"] == "scored":
            if record["scores"][metric] is None:
                raise SetupError(f"these runs have no {metric} score: compare them by official")
            usable.setdefault(key[0], []).append(key)

    def mean(run: Run, keys: Sequence[Key]) -> float:
        return sum(float(run.episodes[key]["scores"][metric]["score"]) for key in keys) / len(keys)

    pairs = []
    for question_id, keys in usable.items():
        record = a.episodes[keys[0]]
        pairs.append(Pair(question_id, record["db_id"], record["difficulty"], mean(a, keys), mean(b, keys)))
    return pairs, len(questions) - len(pairs)


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
    a: Run, b: Run, *, metric: str = "official", cluster: bool = False, seed: int = 0, by_difficulty: bool = False
) -> dict[str, Any]:
    """The comparison of two runs, with a verdict in words. SetupError when they cannot be compared."""
    check_comparable(a, b)
    pairs, excluded = pair_up(a, b, metric)
    result: dict[str, Any] = compare_pairs(pairs, cluster=cluster, seed=seed)
    result |= {
        "metric": metric,
        "rule": a.summary["rules"][metric],
        "excluded": excluded,
        "run_a": str(a.folder),
        "run_b": str(b.folder),
        "differs": [key for key in _SHOWN_DIFFERENCES if a.identity.get(key) != b.identity.get(key)],
    }
    if by_difficulty:
        groups = {label: [p for p in pairs if p.difficulty == label] for label in sorted({p.difficulty for p in pairs})}
        strata = {
            label or "(none)": compare_pairs(group, cluster=cluster, seed=seed) for label, group in groups.items()
        }
        for stratum, adjusted in zip(strata.values(), holm([s["p"] for s in strata.values()]), strict=True):
            stratum["p_holm"] = adjusted
        result["by_difficulty"] = strata
    result["verdict"] = verdict(result)
    return result


def verdict(result: Mapping[str, Any]) -> str:
    """What the figures allow one to say, in a sentence or two."""
    n, p, points = result["n"], result["p"], 100 * result["delta"]
    low, high = (100 * bound for bound in result["ci"])
    interval = f"95% CI {low:+.1f} to {high:+.1f} points, p = {_p(p)}, n = {n}"
    if result["b"] + result["c"] == 0:
        return f"No question was answered differently: A and B score the same on all {n}."
    if p < ALPHA:
        better = "B is better than A" if points > 0 else "A is better than B"
        if low <= 0 <= high:
            return f"{better} by {abs(points):.1f} points by the test, but the interval includes 0 ({interval})."
        return f"{better} by {abs(points):.1f} points ({interval})."
    text = f"No difference shown: B - A is {points:+.1f} points ({interval})."
    detectable = result["minimum_detectable_effect"]
    if detectable is None:
        return f"{text} With so few questions answered differently, no difference could have been shown."
    return f"{text} A true difference below {100 * detectable:.1f} points would usually stay unseen at this n."


def _p(p: float) -> str:
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


def render(result: Mapping[str, Any]) -> str:
    """The comparison as text for a terminal."""
    lines = [
        f"A  {result['run_a']}",
        f"B  {result['run_b']}",
        "",
        f"{'':16}{'n':>6}{'A':>9}{'B':>9}{'B - A':>9}  {'95% CI':>18}{'only A':>8}{'only B':>8}{'p':>10}",
        _row(result["metric"], result),
    ]
    for label, stratum in result.get("by_difficulty", {}).items():
        lines.append(f"{_row(label, stratum)}  (Holm {_p(stratum['p_holm'])})")
    unit = result["bootstrap"]["unit"]
    lines += ["", result["verdict"]]
    if result["minimum_detectable_effect"] is not None:
        lines.append(
            f"Detectable at this n with 80% power: {100 * result['minimum_detectable_effect']:.1f} points; "
            f"{100 * result['flip_rate']:.1f}% of the questions flipped. Bootstrap over each {unit}."
        )
    if result["excluded"]:
        lines.append(f"{result['excluded']} questions without a verdict in one of the runs are left out of both.")
    if result["differs"]:
        lines.append(f"Besides the model, the runs differ in: {', '.join(result['differs'])}.")
    return "\n".join(lines)


def _row(label: str, figures: Mapping[str, Any]) -> str:
    interval = f"[{figures['ci'][0]:+.4f}, {figures['ci'][1]:+.4f}]"
    return (
        f"{label:<16}{figures['n']:>6}{figures['score_a']:>9.4f}{figures['score_b']:>9.4f}{figures['delta']:>+9.4f}"
        f"  {interval:>18}{figures['b']:>8}{figures['c']:>8}{_p(figures['p']):>10}"
    )


def main() -> int:
    """The command line."""
    parser = ArgumentParser(prog="python -m eval.compare", description="Compare two finished runs.")
    parser.add_argument("a", type=Path, help="output folder of run A (say, before)")
    parser.add_argument("b", type=Path, help="output folder of run B (say, after)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--metric", choices=METRICS, default="official", help="which verdict is compared")
    parser.add_argument("--cluster", choices=("database",), help="draw whole databases in the bootstrap")
    parser.add_argument("--by", choices=("difficulty",), help="compare each stratum too, Holm-adjusted")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default 0)")
    arguments = parser.parse_args()
    result = compare(
        load_run(arguments.a),
        load_run(arguments.b),
        metric=arguments.metric,
        cluster=arguments.cluster is not None,
        seed=arguments.seed,
        by_difficulty=arguments.by is not None,
    )
    print(json.dumps(result, indent=2) if arguments.json else render(result))
    return 0


if __name__ == "__main__":
    run_main(main)
