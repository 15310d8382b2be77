"""What a comparison's figures allow one to say, and how they look on a terminal."""

from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any, Literal

from eval.stats import ALPHA

VerdictName = Literal["identical", "b_better", "a_better", "not_shown", "cannot_show"]


def p_of(result: Mapping[str, Any]) -> float:
    """The p that decides: adjusted for its family where the comparison is one of several."""
    p: float = result.get("p_holm", result["p"])
    return p


def verdict_name(result: Mapping[str, Any]) -> VerdictName:
    """The verdict in one word.

    identical: no question scores differently. b_better, a_better: p < 0.05 (Holm-adjusted in a family). cannot_show: so
    few questions differ that no split of them would reach p < 0.05, or that the detectable effect exceeds them all.
    not_shown: anything else, which is not the same as equal.
    """
    if result["b"] + result["c"] == 0:
        return "identical"
    if p_of(result) < ALPHA:
        return "b_better" if result["c"] > result["b"] else "a_better"
    if result["smallest_significant_delta"] is None or result["minimum_detectable_effect"] is None:
        return "cannot_show"
    return "not_shown"


def verdict(result: Mapping[str, Any]) -> str:
    """The verdict in a sentence or two."""
    name, n, points = verdict_name(result), result["n"], 100 * result["delta"]
    low, high = (100 * bound for bound in result["ci"])
    adjusted = "Holm p" if "p_holm" in result else "p"
    interval = f"95% CI {low:+.1f} to {high:+.1f} points, {adjusted} = {p_text(p_of(result))}, n = {n}"
    if name == "identical":
        return f"No question was answered differently: A and B score the same on all {n}."
    if name in ("a_better", "b_better"):
        better = "B is better than A" if name == "b_better" else "A is better than B"
        text = f"{better} by {abs(points):.1f} points ({interval})."
        if low <= 0 <= high:
            text = f"{better} by {abs(points):.1f} points by the test, but the interval includes 0 ({interval})."
    else:
        text = f"No difference shown: B - A is {points:+.1f} points ({interval})."
        if name == "cannot_show":
            text += " With so few questions answered differently, no difference could have been shown."
        else:
            detectable = 100 * result["minimum_detectable_effect"]
            text += f" A true difference below {detectable:.1f} points would usually stay unseen at this n."
        if not low <= 0 <= high:
            text += " The interval leaves 0 out all the same: a bootstrap of so few differing questions is too narrow."
    return " ".join([text, *_noise_sentences(result)])


def _noise_sentences(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("same_model"):
        yield (
            f"Both are runs of one model with different seeds: the {100 * result['flip_rate']:.1f}% of questions that "
            "flip are noise, and so is the difference."
        )
    elif below_noise(result):
        yield (
            f"The difference is smaller than the share of questions that flips between two runs of one model "
            f"({100 * result['noise']['flip_rate']:.1f}%): take it with care."
        )


def below_noise(result: Mapping[str, Any]) -> bool:
    """True when a noise floor is known and the difference does not rise above it."""
    noise = result.get("noise")
    return noise is not None and abs(result["delta"]) < noise["flip_rate"]


def p_text(p: float) -> str:
    """A p-value with four digits, or in powers of ten below that."""
    return f"{p:.4f}" if p >= 0.0001 else f"{p:.1e}"


_HEAD = f"{'':16}{'n':>6}{'A':>9}{'B':>9}{'B - A':>9}  {'95% CI':>18}{'only A':>8}{'only B':>8}{'p':>10}"


def render(result: Mapping[str, Any]) -> str:
    """The comparison of two runs as text."""
    lines = [f"A  {result['run_a']}", f"B  {result['run_b']}", "", _HEAD, _row(_label(result), result)]
    for label, stratum in _strata(result):
        lines.append(f"{_row(label, stratum)}  (Holm {p_text(stratum['p_holm'])})")
    lines += ["", result["verdict"], *_footnotes(result)]
    return "\n".join(lines)


def _label(result: Mapping[str, Any]) -> str:
    return f"{result['metric']}, vote" if result["voting"] else str(result["metric"])


def _strata(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("by_difficulty", "by_database"):
        yield from result.get(key, {}).items()


def _footnotes(result: Mapping[str, Any]) -> Iterator[str]:
    if result["minimum_detectable_effect"] is not None:
        yield (
            f"Detectable at this n with 80% power: {100 * result['minimum_detectable_effect']:.1f} points; "
            f"{100 * result['flip_rate']:.1f}% of the questions flipped. "
            f"Bootstrap over each {result['bootstrap']['unit']}, seed {result['bootstrap']['seed']}."
        )
    if result["noise"]:
        yield f"Noise floor: {100 * result['noise']['flip_rate']:.1f}% of the questions ({result['noise']['seen_in']})."
    if result["samples"] != [1, 1]:
        count = f"{result['samples'][0]} and {result['samples'][1]} samples a question"
        how = "each question scores as their vote does" if result["voting"] else "each question scores their mean"
        yield f"{count}: {how}; p is an exact sign test over questions."
    if result["excluded"]:
        yield f"{result['excluded']} questions without a verdict in one of the runs are left out of both."
    if result["differs"]:
        yield f"Besides the model, the runs differ in: {', '.join(result['differs'])}."


def _row(label: str, figures: Mapping[str, Any]) -> str:
    interval = f"[{figures['ci'][0]:+.4f}, {figures['ci'][1]:+.4f}]"
    return (
        f"{label:<16}{figures['n']:>6}{figures['score_a']:>9.4f}{figures['score_b']:>9.4f}{figures['delta']:>+9.4f}"
        f"  {interval:>18}{figures['b']:>8}{figures['c']:>8}{p_text(figures['p']):>10}"
    )


def names(count: int) -> list[str]:
    """A, B, …, Z, AA, AB, …"""
    letters = ascii_uppercase
    return [letters[i] if i < 26 else letters[i // 26 - 1] + letters[i % 26] for i in range(count)]


def render_matrix(result: Mapping[str, Any]) -> str:
    """The comparison of many runs as text: a matrix of differences, then a line a pair."""
    pairs, letters = result["pairs"], names(len(result["runs"]))
    scores: dict[int, float] = {}
    for pair in pairs:
        scores.setdefault(pair["i"], pair["score_a"])
        scores.setdefault(pair["j"], pair["score_b"])
    lines = [f"{letter:<3}{scores[i]:.4f}  {result['runs'][i]}" for i, letter in enumerate(letters)]
    lines += ["", f"{_label(pairs[0])}: column minus row, in points; * Holm p < {ALPHA} over {result['family']} pairs"]
    lines.append(f"{'':3}" + "".join(f"{letter:>9}" for letter in letters))
    cells = {(pair["i"], pair["j"]): _cell(pair) for pair in pairs}
    for i, letter in enumerate(letters):
        lines.append(f"{letter:<3}" + "".join(f"{cells.get((i, j), ''):>9}" for j in range(len(letters))))
    lines += ["", f"{'':8}{_HEAD[8:]}{'Holm p':>10}  verdict"]
    for pair in pairs:
        lines.append(f"{_row(_arrow(pair, letters), pair)}{p_text(pair['p_holm']):>10}  {_word(pair, letters)}")
        for label, stratum in _strata(pair):
            lines.append(f"{_row('  ' + label, stratum)}{p_text(stratum['p_holm']):>10}")
    if result["noise"]:
        lines += ["", f"Noise floor: {100 * result['noise']['flip_rate']:.1f}% of the questions flip "
                      f"({result['noise']['seen_in']}); ~ marks smaller differences."]  # fmt: skip
    excluded = max(pair["excluded"] for pair in pairs)
    if excluded:
        lines.append(f"Up to {excluded} questions without a verdict in one run of a pair are left out of both.")
    return "\n".join(lines)


def _cell(pair: Mapping[str, Any]) -> str:
    mark = "*" if verdict_name(pair) in ("a_better", "b_better") else " "
    return f"{100 * pair['delta']:+.1f}{mark}{'~' if below_noise(pair) else ' '}"


def _arrow(pair: Mapping[str, Any], letters: Sequence[str]) -> str:
    return f"{letters[pair['i']]} -> {letters[pair['j']]}"


def _word(pair: Mapping[str, Any], letters: Sequence[str]) -> str:
    a, b = letters[pair["i"]], letters[pair["j"]]
    if pair["same_model"]:
        return "one model, two seeds: noise"
    detectable = pair["minimum_detectable_effect"]
    text = {
        "identical": "the same on every question",
        "b_better": f"{b} is better",
        "a_better": f"{a} is better",
        "cannot_show": "could not be shown",
        "not_shown": f"not shown (detectable: {100 * (detectable or 0.0):.1f} points)",
    }[verdict_name(pair)]
    return f"{text}, below the noise floor" if below_noise(pair) and verdict_name(pair) != "identical" else text
