"""What a report says about a run, or about two runs compared: its sentence, tiles, tables, plots and episodes.

The HTML page and the markdown file are two renderings of one `Content`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.breakdown import accuracies, accuracy, by_database, by_difficulty, by_gold_length, difficulty_order
from eval.compare import compare, compare_pairs
from eval.measures import CLASSES, TIERS, Record, tier
from eval.pairing import Pair, Run, pair_up
from eval.plots import MAX_ROWS, Estimate, Plot, bar_plot, histogram_plot, interval_plot
from eval.stats import holm
from eval.tables import (
    Row,
    Table,
    behaviour_table,
    number,
    outcome_table,
    p_value,
    percent,
    points,
    rules_table,
    score_tables,
    unscored_table,
)
from eval.trace import Viewer, index_entry, trace
from shared.errors import SetupError

TIER_LABELS = {
    "no_answer": "no answer",
    "fails": "fails",
    "wrong": "wrong",
    "official": "right, not strict",
    "strict": "right",
}
_TIER_COLOURS = {"no_answer": "none", "fails": "fails", "wrong": "wrong", "official": "official", "strict": "strict"}
_RIGHT = ("official", "strict")
EVALUATION = Viewer(
    kind="evaluation",
    classes={key: (found.label, found.tier) for key, found in CLASSES.items()},
    tiers={**TIER_LABELS, "unscored": "no verdict"},
    entry=index_entry,
    trace=trace,
    record="Everything that determines the result of a run.",
)


@dataclass(frozen=True)
class Tile:
    """One figure of the headline, with what it is and what belongs beside it."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Content:
    """All of a report. `episodes` holds for each question one record a run; `runs` names the runs."""

    title: str
    subtitle: str
    sentence: str
    tiles: tuple[Tile, ...]
    tables: tuple[Table, ...]
    plots: tuple[Plot, ...]
    runs: tuple[str, ...]
    episodes: tuple[tuple[Record, ...], ...]
    identities: tuple[Mapping[str, Any], ...]
    viewer: Viewer = EVALUATION


def run_content(run: Run) -> Content:
    """The report of one finished run. SetupError when an older version of this program wrote it."""
    records, summary = list(run.episodes.values()), _summary(run)
    identity = run.identity
    unscored = unscored_table(summary)
    tables = [*score_tables(records, summary), outcome_table(summary), behaviour_table([summary], ["value"])]
    tables += [rules_table(summary), *([unscored] if unscored else [])]
    return Content(
        title=run_name(run),
        subtitle=_subtitle(identity),
        sentence=_sentence(summary, records),
        tiles=_tiles(summary, records),
        tables=tuple(tables),
        plots=tuple(_run_plots(records, summary)),
        runs=(run_name(run),),
        episodes=tuple((record,) for record in records),
        identities=(identity,),
    )


def comparison_content(a: Run, b: Run) -> Content:
    """The report of two runs on the same questions. SetupError when they cannot be compared."""
    result = compare(a, b, by_difficulty=True)
    names = _two_names(a, b)
    summaries = _summary(a), _summary(b)
    records = list(a.episodes.values())
    pairs, _ = pair_up(a, b, "official")
    # With unequal samples, traces stand side by side for those that both runs have.
    both = [(record, b.episodes[key]) for key, record in a.episodes.items() if key in b.episodes]
    lengths = _paired_by_length(records, pairs)
    rows = [("all questions", result)]
    strata = result["by_difficulty"]
    rows += [(label, strata[label]) for label in sorted(strata, key=difficulty_order)] if len(strata) > 1 else []
    tables = [
        _paired_table("Paired comparison", rows, names),
        _paired_table("By length of the gold query", lengths, names),
        _transition_table(both, names),
        behaviour_table(summaries, names),
        rules_table(summaries[0]),
        _settings_table(a, b, names),
    ]
    return Content(
        title=f"{names[0]} → {names[1]}",
        subtitle=_comparison_subtitle(a.identity, b.identity, names),
        sentence=result["verdict"],
        tiles=_comparison_tiles(result, names),
        tables=tuple(table for table in tables if table.rows),
        plots=tuple(_comparison_plots(rows, lengths, both, names)),
        runs=names,
        episodes=tuple(both),
        identities=(a.identity, b.identity),
    )


def run_name(run: Run) -> str:
    """The model folder's name, or the script's, or the model as it was given."""
    model = run.identity.get("model")
    return Path(model).name or str(model) if model else str(run.identity["engine"])


def _two_names(a: Run, b: Run) -> tuple[str, str]:
    first, second = run_name(a), run_name(b)
    if first != second:
        return first, second
    first, second = a.folder.resolve().name, b.folder.resolve().name
    return (first, second) if first != second else ("A", "B")


def _summary(run: Run) -> Mapping[str, Any]:
    if not {"measures", "samples"} <= run.summary.keys():
        raise SetupError(f"run {run.folder} was written by an older version: delete its summary.json and run it again")
    return run.summary


def _subtitle(identity: Mapping[str, Any]) -> str:
    return f"{identity['benchmark']} · schema {'shown' if identity['mode'] == 'full' else 'withheld'}"


def _comparison_subtitle(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> str:
    first, second = _subtitle(a), _subtitle(b)
    if first == second:
        return f"{first} · A is {names[0]}, B is {names[1]}"
    return f"A is {names[0]}, {first}; B is {names[1]}, {second}"


# ---- one run


def _sentence(summary: Mapping[str, Any], records: Sequence[Record]) -> str:
    whole = accuracy("", records)
    if whole is None:
        return "No episode has a verdict."
    tiers, left = summary["measures"]["tiers"], len(summary["excluded"])
    right = sum(tiers[key] for key in _RIGHT)
    text = (
        f"{right:,} of {summary['n']:,} scored episodes are right: {percent(whole.official)}, "
        f"95% interval {100 * whole.low:.1f} to {100 * whole.high:.1f}. "
        f"{tiers['wrong']:,} answers run and are wrong, {tiers['fails']:,} fail, "
        f"{tiers['no_answer']:,} episodes have no answer."
    )
    if left:
        text += f" {left:,} without a verdict {'is' if left == 1 else 'are'} left out."
    return text


def _tiles(summary: Mapping[str, Any], records: Sequence[Record]) -> tuple[Tile, ...]:
    whole = accuracy("", records)
    interval = f"{100 * whole.low:.1f} – {100 * whole.high:.1f}, n = {whole.n:,}" if whole else "no verdicts"
    return (
        Tile("official", percent(summary["official"]), interval),
        Tile("strict", percent(summary["strict"]), "order and duplicates count"),
        Tile("submitted", percent(summary["submit_rate"]), f"{percent(summary['executes_rate'])} of answers execute"),
        Tile("tool calls", number(summary["mean_calls"]), f"in {number(summary['mean_turns'])} turns"),
        Tile(
            "tokens sampled",
            number(summary["mean_sampled_tokens"], 0),
            f"{percent(summary['truncation_rate'])} truncated",
        ),
    )


def _run_plots(records: Sequence[Record], summary: Mapping[str, Any]) -> list[Plot]:
    plots = []
    for title, groups in (
        ("Official score by difficulty", by_difficulty(records)),
        ("Official score by gold length", by_gold_length(records)),
        ("Official score by database", by_database(records)),
    ):
        rows = [Estimate(r.label, r.official, r.low, r.high, r.n) for r in accuracies(groups)]
        if 1 < len(rows) <= MAX_ROWS:
            note = "Point and 95% interval; in brackets the number of episodes."
            plots.append(interval_plot(title, note, rows, xlabel="official, %"))
    counts = summary["measures"]["classes"]
    if counts:
        bars = [(CLASSES[key].label, count, _TIER_COLOURS[CLASSES[key].tier]) for key, count in counts.items()]
        plots.append(bar_plot("How episodes ended", "Each scored episode once.", bars, xlabel="episodes"))
    scored = [record for record in records if record["status"] == "scored"]
    right = [r for r in scored if r["scores"]["official"]["score"] >= 1.0]
    wrong = [r for r in scored if r["scores"]["official"]["score"] < 1.0]
    for title, value, xlabel in (
        ("Tool calls an episode", _calls, "tool calls"),
        ("Tokens an episode", _tokens, "tokens sampled"),
    ):
        if scored:
            groups_ = [
                ("right", [value(r) for r in right], "strict"),
                ("not right", [value(r) for r in wrong], "wrong"),
            ]
            plots.append(histogram_plot(title, "Stacked: the two together are all episodes.", groups_, xlabel=xlabel))
    return plots


def _calls(record: Record) -> float:
    return float(sum(len(turn["calls"]) for turn in record["turns"]))


def _tokens(record: Record) -> float:
    return float(record["sampled_tokens"])


# ---- two runs


def _paired_by_length(records: Sequence[Record], pairs: Sequence[Pair]) -> list[tuple[str, Mapping[str, Any]]]:
    by_id = {pair.question_id: pair for pair in pairs}
    strata = []
    for label, group in by_gold_length([r for r in records if r["question_id"] in by_id]).items():
        members = [by_id[key] for key in dict.fromkeys(record["question_id"] for record in group)]
        strata.append((label, compare_pairs(members)))
    adjusted = holm([figures["p"] for _, figures in strata])
    return [(label, {**figures, "p_holm": p}) for (label, figures), p in zip(strata, adjusted, strict=True)]


def _paired_table(title: str, rows: Sequence[tuple[str, Mapping[str, Any]]], names: tuple[str, str]) -> Table:
    return Table(
        title,
        "Paired on the question: McNemar's exact test, paired bootstrap interval of the difference in points; "
        "p (Holm) is adjusted over the lines that are parts of the whole.",
        ("", "n", *names, "B − A", "95% interval", f"only {names[0]}", f"only {names[1]}", "p", "p (Holm)"),
        tuple(
            Row(
                (
                    label,
                    f"{f['n']:,}",
                    percent(f["score_a"]),
                    percent(f["score_b"]),
                    points(f["delta"]),
                    f"{points(f['ci'][0])} to {points(f['ci'][1])}",
                    f"{f['b']:,}",
                    f"{f['c']:,}",
                    p_value(f["p"]),
                    p_value(f["p_holm"]) if "p_holm" in f else "",
                )
            )
            for label, f in rows
        ),
    )


def _transition_table(both: Sequence[tuple[Record, Record]], names: tuple[str, str]) -> Table:
    counts = {(x, y): 0 for x in TIERS for y in TIERS}
    for a, b in both:
        from_, to = tier(a), tier(b)
        if from_ is not None and to is not None:
            counts[from_, to] += 1
    return Table(
        "What became of what",
        f"Lines: how far the episode came in {names[0]}; columns: in {names[1]}.",
        ("", *(TIER_LABELS[key] for key in TIERS)),
        tuple(Row((TIER_LABELS[x], *(f"{counts[x, y]:,}" for y in TIERS)), {"tier-0": x}) for x in TIERS),
    )


def _settings_table(a: Run, b: Run, names: tuple[str, str]) -> Table:
    keys = [key for key in a.identity if a.identity.get(key) != b.identity.get(key)]
    return Table(
        "Settings that differ",
        "Everything else that determines a run is the same in both.",
        ("", *names),
        tuple(Row((key, str(a.identity.get(key)), str(b.identity.get(key)))) for key in keys),
        words=(1, 2),
    )


def _comparison_tiles(result: Mapping[str, Any], names: tuple[str, str]) -> tuple[Tile, ...]:
    low, high = result["ci"]
    detectable = result["minimum_detectable_effect"]
    return (
        Tile("B − A", f"{points(result['delta'])} points", f"95% interval {points(low)} to {points(high)}"),
        Tile(f"A: {names[0]}", percent(result["score_a"]), f"{result['b']:,} questions only here"),
        Tile(f"B: {names[1]}", percent(result["score_b"]), f"{result['c']:,} questions only here"),
        Tile("p", p_value(result["p"]), f"McNemar, exact, n = {result['n']:,}"),
        Tile(
            "detectable",
            "–" if detectable is None else f"{100 * detectable:.1f} points",
            f"with 80% power; {percent(result['flip_rate'])} flipped",
        ),
    )


def _comparison_plots(
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    lengths: Sequence[tuple[str, Mapping[str, Any]]],
    both: Sequence[tuple[Record, Record]],
    names: tuple[str, str],
) -> list[Plot]:
    estimates = [Estimate(label, f["delta"], f["ci"][0], f["ci"][1], f["n"]) for label, f in [*rows, *lengths]]
    xlabel = "difference in points"
    note = "Right of the line, the second run is better. Point and paired bootstrap interval."
    plots = [interval_plot("Difference in the official score", note, estimates, xlabel=xlabel, difference=True)]
    scored = [(a, b) for a, b in both if a["status"] == b["status"] == "scored"]
    right = [tuple(r["scores"]["official"]["score"] >= 1.0 for r in pair) for pair in scored]
    bars = [
        ("right in both", right.count((True, True)), "strict"),
        (f"only {names[0]}", right.count((True, False)), "accent"),
        (f"only {names[1]}", right.count((False, True)), "other"),
        ("right in neither", right.count((False, False)), "none"),
    ]
    plots.append(bar_plot("Who was right", "Each episode that both runs scored.", bars, xlabel="episodes"))
    for title, value, xlabel in (
        ("Tool calls an episode", _calls, "tool calls"),
        ("Tokens an episode", _tokens, "tokens sampled"),
    ):
        groups = [
            (name, [value(pair[side]) for pair in scored], colour)
            for side, (name, colour) in enumerate(zip(names, ("accent", "other"), strict=True))
        ]
        plots.append(histogram_plot(title, "One outline a run.", groups, xlabel=xlabel, stacked=False))
    return plots
