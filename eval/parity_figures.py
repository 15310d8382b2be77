"""What a parity check's runs amount to: figures per mode, a rule, and a verdict that says which part of it held."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.compare import compare_pairs
from eval.compare_text import p_text
from eval.pairing import check_comparable, load_run, pair_up
from eval.parity_sides import ParityPlan, Side, read_tokens
from eval.records import Key, episode_key, read_json
from eval.stats import ALPHA, holm

NOISE_FACTOR, LOGPROB_FLOOR = 3.0, 1e-4
RULE = (
    "the export differs if a language tensor is not the checkpoint's after the export's dtype, if their configurations "
    "of the language model differ, if the official scores "
    f"of a mode differ with Holm's p < {ALPHA}, or if the log-probs of the same tokens are on average further apart "
    f"than {NOISE_FACTOR:g} times the noise floor plus {LOGPROB_FLOOR:g}, or not there for all of them; "
    "otherwise there is no difference beyond noise"
)


def mode_figures(plan: ParityPlan, mode: Any) -> dict[str, Any]:
    """One mode: `export` against `synced`, and the noise floor, `again` against `synced`. SetupError as in compare."""
    runs = {side: load_run(plan.run_folder(side, mode)) for side in ("synced", "again", "export")}
    tokens = {side: read_tokens(plan.tokens_file(_side(side), mode)) for side in runs}
    scores = {side: _scores(plan, _side(side), mode) for side in runs}
    found: dict[str, Any] = {}
    for name in ("export", "again"):
        check_comparable(runs["synced"], runs[name])
        pairs, excluded = pair_up(runs["synced"], runs[name], "official")
        found[name] = {
            **compare_pairs(pairs, seed=plan.evaluation.seed),
            "excluded": excluded,
            "same_tokens": _same_tokens(tokens["synced"], tokens[name]),
            "logprobs": _gap(scores["synced"], scores[name]),
        }
    sampled = {
        key: [logprob for logprob, flag in zip(episode["logprobs"], episode["mask"], strict=True) if flag]
        for key, episode in tokens["synced"].items()
    }
    return {"mode": mode, **found, "sampler_against_scorer": _gap(sampled, scores["synced"])}


def _side(name: str) -> Side:
    return "export" if name == "export" else "again" if name == "again" else "synced"


def _scores(plan: ParityPlan, side: Side, mode: Any) -> dict[Key, list[float]]:
    found = read_json(plan.scores_file(side, mode))["episodes"]
    return {episode_key(episode): episode["logprobs"] for episode in found}


def _same_tokens(a: Mapping[Key, Mapping[str, Any]], b: Mapping[Key, Mapping[str, Any]]) -> float:
    """The share of episodes with the same token ids from beginning to end."""
    common = a.keys() & b.keys()
    return sum(a[key]["ids"] == b[key]["ids"] for key in common) / len(common) if common else 0.0


def _gap(a: Mapping[Key, Sequence[float]], b: Mapping[Key, Sequence[float]]) -> dict[str, Any]:
    """|difference| of two scorings of the same tokens: mean and largest, over `tokens` of them.

    `missing` counts tokens that only one of them has, or for which one is not a number.
    """
    gaps = [abs(x - y) for key in a.keys() & b.keys() for x, y in zip(a[key], b[key], strict=False)]
    known = [gap for gap in gaps if math.isfinite(gap)]
    return {
        "tokens": len(known),
        "missing": max(sum(map(len, a.values())), sum(map(len, b.values()))) - len(known),
        "mean": sum(known) / len(known) if known else None,
        "max": max(known) if known else None,
    }


def judge(weights: Mapping[str, Any], modes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All figures with Holm's p over the modes, and the verdict by `RULE`."""
    for name in ("export", "again"):
        for figures, adjusted in zip(modes, holm([mode[name]["p"] for mode in modes]), strict=True):
            figures[name]["p_holm"] = adjusted
    reasons = list(_reasons(weights, modes))
    return {
        "verdict": f"differs: {'; '.join(reasons)}" if reasons else "no difference beyond noise",
        "differs": bool(reasons),
        "reasons": reasons,
        "rule": RULE,
        "weights": dict(weights),
        "modes": list(modes),
    }


def _reasons(weights: Mapping[str, Any], modes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for kind, text in (("different", "are not the checkpoint's"), ("missing", "are in one of the folders only")):
        if names := weights[kind]:
            yield f"{len(names)} language tensors {text}, {names[0]} for one"
    if keys := weights["settings"]:
        yield f"the configurations differ in {', '.join(keys)}"
    for figures in modes:
        export, again, mode = figures["export"], figures["again"], figures["mode"]
        if export["p_holm"] < ALPHA:
            within = "no more" if export["flip_rate"] <= again["flip_rate"] else "more"
            yield (
                f"official in mode {mode} is {100 * export['delta']:+.1f} points from the synced weights' "
                f"(Holm p = {p_text(export['p_holm'])}; {within} questions flip than between two runs of those weights)"
            )
        if missing := export["logprobs"]["missing"]:
            yield f"{missing} log-probs in mode {mode} are missing on one side, or are no numbers"
        gap, noise = export["logprobs"]["mean"], again["logprobs"]["mean"] or 0.0
        if gap is None:
            yield f"no log-probs in mode {mode} could be compared"
        elif gap > NOISE_FACTOR * noise + LOGPROB_FLOOR:
            yield f"log-probs in mode {mode} are {gap:.2g} apart on average (noise floor {noise:.2g})"


def render(result: Mapping[str, Any]) -> str:
    """The result as text."""
    weights = result["weights"]
    lines = [
        f"weights: {weights['compared']} language tensors compared, {len(weights['different'])} different, "
        f"{len(weights['missing'])} in one folder only",
        *(f"  {name}" for name in [*weights["different"], *weights["missing"]][:10]),
        "",
        f"{'':26}{'n':>6}{'synced':>9}{'other':>9}{'diff':>9}  {'95% CI':>18}{'Holm p':>9}{'flips':>8}"
        f"{'same ids':>10}{'|d logp| mean':>15}{'max':>10}",
    ]
    for figures in result["modes"]:
        lines.append(_row(f"{figures['mode']}: export", figures["export"]))
        lines.append(_row("  noise floor (again)", figures["again"]))
    lines += ["", f"Verdict: {result['verdict']}.", f"Rule: {result['rule']}."]
    if any(figures["export"]["minimum_detectable_effect"] is not None for figures in result["modes"]):
        shown = ", ".join(
            f"{figures['mode']} {100 * effect:.1f} points"
            for figures in result["modes"]
            if (effect := figures["export"]["minimum_detectable_effect"]) is not None
        )
        lines.append(f"True differences that would usually stay unseen at this n are below: {shown}.")
    return "\n".join(lines)


def _row(label: str, figures: Mapping[str, Any]) -> str:
    low, high = figures["ci"]
    gap = figures["logprobs"]
    mean, largest = ("-" if gap[key] is None else f"{gap[key]:.2e}" for key in ("mean", "max"))
    return (
        f"{label:26}{figures['n']:>6}{figures['score_a']:>9.3f}{figures['score_b']:>9.3f}{figures['delta']:>+9.3f}"
        f"  {f'{low:+.3f} to {high:+.3f}':>18}{p_text(figures['p_holm']):>9}{figures['flip_rate']:>8.1%}"
        f"{figures['same_tokens']:>10.1%}{mean:>15}{largest:>10}"
    )
