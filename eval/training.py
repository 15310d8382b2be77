"""The sampled episodes of a training run as a report: `python -m eval.report RUN/episodes/step-000025.jsonl`."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eval.content import Content, Tile
from eval.measures import Record
from eval.plots import Plot, bar_plot, histogram_plot
from eval.tables import Row, Table, number, percent
from eval.training_lines import TIERS, TRAINING, group_name, read_step, step_files
from shared.config import load_yaml
from shared.episode import EpisodeConfig
from shared.text import plain

Key = TypeVar("Key", bound=Hashable)

LAST_STEPS = 20
_TIERS_NOTE = (
    "equivalent: gold's result; executable: another; parsable: a query that does not run; invalid: the rest. Where a "
    "run has several ranks, these are the questions of the first."
)
_QUESTION_CHARACTERS = 90


def training_content(path: Path, last_steps: int = LAST_STEPS) -> Content:
    """The report of one file, or of the last `last_steps` sampled steps of a run (0: all).

    SetupError when there are no episodes, or a file is damaged or of something else.
    """
    files = step_files(path)
    shown = files[-last_steps:] if last_steps else files
    records = [record for file in shown for record in read_step(file)]
    run = shown[0].parent.parent if shown[0].parent.name == "episodes" else shown[0].parent
    config = load_yaml(run / "config.yaml") if (run / "config.yaml").is_file() else None
    steps = sorted({record["training"]["step"] for record in records})
    subtitle = f"training · step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    if len(shown) < len(files):
        subtitle += f" · the last {len(shown)} of {len(files)} sampled steps"
    groups = _by(records, group_name)
    return Content(
        title=plain(run.resolve().name),
        subtitle=subtitle,
        sentence=_sentence(records, len(groups), len(steps)),
        tiles=_tiles(records),
        tables=(_step_table(records), _group_table(groups)),
        plots=tuple(_plots(records)),
        runs=(plain(run.resolve().name),),
        episodes=tuple((record,) for record in records),
        identities=(
            {
                "files": [str(file) for file in shown],
                "mode": "",
                "prompt_sha256": "not recorded",
                "budgets": {"max_turns": _max_turns(config or {})},
                "config": config or f"no config.yaml in {run}: the budget lines suppose the default turns",
            },
        ),
        viewer=TRAINING,
    )


def _max_turns(config: Mapping[str, Any]) -> int:
    rollout = config.get("rollout")
    turns = rollout.get("max_turns") if isinstance(rollout, dict) else None
    return turns if isinstance(turns, int) else EpisodeConfig().max_turns


def _by(records: Iterable[Record], key: Callable[[Record], Key]) -> dict[Key, list[Record]]:
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def _mean(records: Sequence[Record], name: str) -> float:
    return sum(float(record["training"][name]) for record in records) / len(records)


def _tiers(records: Sequence[Record]) -> Counter[str]:
    return Counter(record["training"]["tier"] for record in records)


def _calls(record: Record) -> float:
    return float(sum(len(turn["calls"]) for turn in record["turns"]))


def _sentence(records: Sequence[Record], groups: int, steps: int) -> str:
    tiers, n = _tiers(records), len(records)
    sampled = f"{steps:,} sampled step{'s' if steps > 1 else ''}"
    return (
        f"{n:,} episodes of {groups:,} question groups in {sampled}: {tiers['equivalent']:,} "
        f"({percent(tiers['equivalent'] / n)}) have gold's result, {tiers['executable']:,} run to another, "
        f"{tiers['parsable']:,} fail, {tiers['invalid']:,} have no answer that parses."
    )


def _tiles(records: Sequence[Record]) -> tuple[Tile, ...]:
    n = len(records)
    rewards = [record["training"]["reward"] for record in records]
    submitted = sum(record["origin"] == "submitted" for record in records)
    truncated = sum(record["truncated"] for record in records)
    return (
        Tile("reward", f"{_mean(records, 'reward'):.3f}", f"{min(rewards):.2f} to {max(rewards):.2f}"),
        Tile("equivalent", percent(_mean(records, "exact")), f"F1 {_mean(records, 'f1'):.3f}"),
        Tile("submitted", percent(submitted / n), f"{percent(truncated / n)} truncated"),
        Tile(
            "tool calls",
            number(sum(map(_calls, records)) / n),
            f"in {number(sum(len(record['turns']) for record in records) / n)} turns",
        ),
        Tile(
            "tokens sampled",
            number(sum(record["sampled_tokens"] for record in records) / n, 0),
            f"of {number(sum(record['total_tokens'] for record in records) / n, 0)}",
        ),
    )


def _step_table(records: Sequence[Record]) -> Table:
    rows = []
    for step, members in sorted(_by(records, lambda record: record["training"]["step"]).items()):
        tiers, n = _tiers(members), len(members)
        cells = (
            str(step),
            f"{len(_by(members, group_name)):,}",
            f"{n:,}",
            f"{_mean(members, 'reward'):.3f}",
            *(percent(tiers[tier] / n) for tier in TIERS),
            f"{_mean(members, 'quantile'):.3f}",
        )
        rows.append(Row(cells, {"step": str(step)}))
    columns = ("step", "questions", "episodes", "reward", *TIERS, "quantile")
    return Table("Outcomes by step", _TIERS_NOTE, columns, tuple(rows))


def _group_table(groups: Mapping[str, Sequence[Record]]) -> Table:
    rows = []
    for name, members in groups.items():
        tiers = _tiers(members)
        rewards = [record["training"]["reward"] for record in members]
        question = " ".join(plain(members[0]["question"]).split())
        if len(question) > _QUESTION_CHARACTERS:
            question = question[: _QUESTION_CHARACTERS - 1] + "…"
        cells = (
            plain(name),
            f"{len(members):,}",
            *(f"{tiers[tier]:,}" if tiers[tier] else "" for tier in TIERS),
            f"{_mean(members, 'reward'):.3f}",
            f"{min(rewards):.2f} – {max(rewards):.2f}",
            question,
        )
        rows.append(Row(cells, {"group": name}))
    note = (
        "How far the candidates of one question came; a line leads to them. Rewards that are all equal teach nothing."
    )
    columns = ("group", "candidates", *TIERS, "reward", "lowest – highest", "question")
    return Table("Outcomes by question", note, columns, tuple(rows), words=(len(columns) - 1,))


def _plots(records: Sequence[Record]) -> list[Plot]:
    tiers = _tiers(records)
    bars = [(tier, tiers[tier], TIERS[tier].replace("no_answer", "none")) for tier in TIERS]
    plots = [bar_plot("How episodes ended", "Each episode once.", bars, xlabel="episodes")]
    right, wrong = ([r for r in records if r["training"]["exact"] is exact] for exact in (True, False))
    for title, value, xlabel in (
        ("Tool calls an episode", _calls, "tool calls"),
        ("Tokens an episode", lambda record: float(record["sampled_tokens"]), "tokens sampled"),
    ):
        groups = [
            ("equivalent", [value(r) for r in right], "strict"),
            ("not equivalent", [value(r) for r in wrong], "wrong"),
        ]
        plots.append(histogram_plot(title, "Stacked: the two together are all episodes.", groups, xlabel=xlabel))
    return plots
