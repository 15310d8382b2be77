"""The sampled episodes of a training run as a report: `python -m eval.report RUN/episodes/step-000025.jsonl`.

A training run writes each n-th step's episodes to RUN/episodes/step-NNNNNN.jsonl, one JSON object a line:

    step, quantile       when it was asked, and where its question stands in the pool by gold length (0 to 1)
    question, gold_sql   what was asked; `evidence` and `difficulty` where the line has them
    score                reward and its parts (exact, f1, partial, join, majority), and the outcome tier
    episode              the episode's record: question_id, db_id, mode, answer_sql, origin, ended, turns, …

The candidates of one question in one step form a group. This is all that is known of training here: no code is shared.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from eval.content import Content, Tile
from eval.measures import Record
from eval.plots import Plot, bar_plot, histogram_plot
from eval.tables import Row, Table, number, percent
from eval.trace import Viewer, index_entry, trace
from shared.config import load_yaml
from shared.episode import EpisodeConfig
from shared.errors import SetupError
from shared.text import plain

FILES = "step-*.jsonl"
LAST_STEPS = 20
TrainingTier = Literal["equivalent", "executable", "parsable", "invalid"]
# Each tier of the reward, and the viewer's colour and mark for it.
TIERS: Mapping[TrainingTier, str] = {
    "equivalent": "strict",
    "executable": "wrong",
    "parsable": "fails",
    "invalid": "no_answer",
}
_TIERS_NOTE = (
    "equivalent: gold's result; executable: another; parsable: a query that does not run; invalid: the rest. Where a "
    "run has several ranks, these are the questions of the first."
)
_QUESTION_CHARACTERS = 90
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    """Further keys are a later version's, and not shown."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Score(_Part):
    reward: _Finite
    tier: TrainingTier
    exact: bool
    f1: _Finite
    partial: _Finite
    join: _Finite
    majority: _Finite


class _Call(_Part):
    tool: str
    args: dict[str, Any]
    outcome: str
    text: str


class _Turn(_Part):
    text: str
    start: _Count
    n_tokens: _Count
    stop_reason: str
    clean: bool
    problem: str | None
    dropped: _Count
    closing: bool
    calls: list[_Call]


class _Episode(_Part):
    question_id: str
    db_id: str
    mode: Literal["full", "withheld"]
    answer_sql: str | None
    origin: str
    ended: str
    n_prompt_tokens: _Count
    error: str | None = None
    turns: list[_Turn]


class _Line(_Part):
    step: _Count
    quantile: _Finite
    question: str
    gold_sql: str
    evidence: str = ""
    difficulty: str = ""
    score: _Score
    episode: _Episode


def is_training(path: Path) -> bool:
    """Whether a path given to eval.report is of a training run: a file of JSON lines, or a folder with such files."""
    return path.suffix == ".jsonl" or any(path.glob(FILES)) or (path / "episodes").is_dir()


def default_report(path: Path) -> Path:
    """Where the report goes: beside the file, or into the folder, under names that no other report takes."""
    return path.with_suffix(".html") if path.is_file() else path / "episodes.html"


def step_files(path: Path) -> list[Path]:
    """The episode files of a run's folder, of its episodes folder, or the one given, by step. SetupError for none."""
    if path.is_file():
        return [path]
    files = sorted([*path.glob(FILES), *(path / "episodes").glob(FILES)])
    if not files:
        what = "has no sampled episodes yet (key sample_episodes_every)" if path.is_dir() else "does not exist"
        raise SetupError(f"{path} {what}: give the folder of a training run, or one of its episodes/{FILES}")
    return files


def read_step(path: Path) -> list[Record]:
    """The episodes of one file, as records that the viewer shows. SetupError names the first line that is damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read ({error}): give an episodes/{FILES} of a training run") from error
    records: list[Record] = []
    candidates: Counter[tuple[int, str]] = Counter()
    for number_, text in enumerate(lines, 1):
        try:
            line = _Line.model_validate(json.loads(text, parse_constant=_no_constant))
            key = (line.step, line.episode.question_id)
            record = _record(line, candidates[key])
            viewer_entry([record])
            viewer_trace(record, 1)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SetupError(
                f"{path}:{number_} is no episode of a training run ({_reason(error)}): "
                f"give an episodes/{FILES} of a training run, or the folder of a finished eval.run"
            ) from error
        candidates[key] += 1
        records.append(record)
    if not records:
        raise SetupError(f"{path} holds no episodes: give another episodes/{FILES}")
    return records


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _reason(error: Exception) -> str:
    """A validation error's first complaint on one line, or the error's name and text."""
    if hasattr(error, "errors"):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(f"{type(error).__name__}: {error}".split())


def _record(line: _Line, candidate: int) -> Record:
    """A line in the shape of an evaluation's record, with what training adds under `training`."""
    episode = line.episode
    last = episode.turns[-1] if episode.turns else None
    return {
        "question_id": episode.question_id,
        "sample": candidate,
        "db_id": episode.db_id,
        "difficulty": line.difficulty,
        "question": line.question,
        "evidence": line.evidence,
        "gold_sql": line.gold_sql,
        "gold": {},
        "status": "scored",
        "reason": "",
        "scores": None,
        "results": None,
        "answer_sql": episode.answer_sql,
        "origin": episode.origin,
        "ended": episode.ended,
        "error": episode.error,
        "truncated": episode.ended == "token_limit" or (last is not None and last.stop_reason == "length"),
        "sampled_tokens": sum(turn.n_tokens for turn in episode.turns),
        "total_tokens": last.start + last.n_tokens if last is not None else episode.n_prompt_tokens,
        "turns": [turn.model_dump() for turn in episode.turns],
        "training": {
            "step": line.step,
            "quantile": line.quantile,
            "mode": episode.mode,
            **line.score.model_dump(),
        },
    }


def group_name(record: Record) -> str:
    """What the viewer calls the candidates of one question in one step."""
    return f"step {record['training']['step']} · {record['question_id']}"


def viewer_entry(records: Sequence[Record]) -> dict[str, Any]:
    """The entry of `eval.trace.index_entry`, with step, group, reward, mode and the tier of the reward."""
    (record,) = records
    found, entry = record["training"], index_entry(records)
    side = {
        "outcome": found["tier"],
        "tier": TIERS[found["tier"]],
        "reward": found["reward"],
        "mode": found["mode"],
    }
    return entry | {
        "step": found["step"],
        "group": group_name(record),
        "sides": [entry["sides"][0] | side],
    }


def viewer_trace(record: Record, max_turns: int) -> dict[str, Any]:
    """The trace of `eval.trace.trace`, with the reward and its parts in the place of verdicts."""
    found = record["training"]
    bonuses = found["partial"] + found["join"] + found["majority"]
    parts = [
        ["reward", found["reward"], f"the sum of the parts; {found['tier']}"],
        ["exact", found["reward"] - bonuses if found["exact"] else 0.0, "gold's set of rows"],
        ["partial", found["partial"], f"for the overlap with gold's result, F1 {found['f1']:.3f}"],
        ["join", found["join"], "for the tables and joins of the gold query"],
        ["majority", found["majority"], "for the result that most candidates of the group agree on"],
    ]
    return trace(record, max_turns) | {"verdicts": [[name, round(value, 4), why] for name, value, why in parts]}


def training_content(path: Path, last_steps: int = LAST_STEPS) -> Content:
    """The report of one file, or of the last `last_steps` sampled steps of a run (0: all).

    SetupError when there are no episodes, or a file is damaged or of something else.
    """
    files = step_files(path)
    shown = files[-last_steps:] if last_steps else files
    records = [record for file in shown for record in read_step(file)]
    run = shown[0].parent.parent if shown[0].parent.name == "episodes" else shown[0].parent
    config = load_yaml(run / "config.yaml") if (run / "config.yaml").is_file() else None
    known = config is not None
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
                "config": config if known else f"no config.yaml in {run}: the budget lines suppose the default turns",
            },
        ),
        viewer=TRAINING,
    )


def _max_turns(config: Mapping[str, Any]) -> int:
    rollout = config.get("rollout")
    turns = rollout.get("max_turns") if isinstance(rollout, dict) else None
    return turns if isinstance(turns, int) else EpisodeConfig().max_turns


def _by(records: Iterable[Record], key: Any) -> dict[Any, list[Record]]:
    found: dict[Any, list[Record]] = {}
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


TRAINING = Viewer(
    kind="training",
    classes={tier: (tier, shown) for tier, shown in TIERS.items()},
    tiers={shown: tier for tier, shown in TIERS.items()},
    entry=viewer_entry,
    trace=viewer_trace,
    record="The files that are shown, and the run's config.",
)
