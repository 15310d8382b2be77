"""The sampled episodes of a training run, read line by line into records that the trace viewer shows.

A training run writes each n-th step's episodes to RUN/episodes/step-NNNNNN.jsonl, one JSON object a line:

    step, quantile       when it was asked, and where its question stands in the pool by gold length (0 to 1)
    question, gold_sql   what was asked; `evidence` and `difficulty` where the line has them
    score                reward and its parts (exact, f1, partial, join, majority), and the outcome tier
    episode              the episode's record: question_id, db_id, mode, answer_sql, origin, ended, turns, …

The candidates of one question in one step form a group. This is all that is known of training here: no code is shared.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from eval.measures import Record
from eval.trace import Viewer, index_entry, trace
from shared.errors import SetupError

FILES = "step-*.jsonl"
TrainingTier = Literal["equivalent", "executable", "parsable", "invalid"]
# Each tier of the reward, and the viewer's colour and mark for it.
TIERS: Mapping[TrainingTier, str] = {
    "equivalent": "strict",
    "executable": "wrong",
    "parsable": "fails",
    "invalid": "no_answer",
}
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


TRAINING = Viewer(
    kind="training",
    classes={tier: (tier, shown) for tier, shown in TIERS.items()},
    tiers={shown: tier for tier, shown in TIERS.items()},
    entry=viewer_entry,
    trace=viewer_trace,
    record="The files that are shown, and the run's config.",
)
