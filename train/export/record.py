"""What a run has on record about one of its checkpoints, and what an export's base says about itself.

Read when the export is made and kept in its report, so that the model card can be written again without either.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from shared.config import StrictModel, build_config
from shared.errors import SetupError
from train.checkpoint import STATE, list_checkpoints, why_incomplete
from train.config import TrainConfig
from train.report import read_metrics
from train.run import CONFIG_COPY
from train.selection import best_line, read_validation

_SNAPSHOT = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)/snapshots/(?P<revision>[0-9a-f]+)")
_FRONT_MATTER = re.compile(r"---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_WINDOW = 20


class Base(StrictModel):
    """The base model: its folder's name, or its hub id and commit; its licence as its own card states it.

    `license_files`: which of LICENSE and NOTICE it has; they are copied into the export.
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    license_files: tuple[str, ...] = ()


class Selection(StrictModel):
    """What validation says about the checkpoint. Scores are official accuracies in [0, 1] on one and the same sample.

    `rounds` trained states were asked, `best_step` scored highest of those that are kept; `score` is this one's own.
    """

    selected_on: str
    rounds: int
    best_step: int | None
    best_score: float | None
    score: float | None


class Progress(StrictModel):
    """Sums over the steps up to the checkpoint, and means over the first and the last `window` of them.

    `ranks` are the numbers of data-parallel processes that took the steps. `sampled_tokens` counts what the policy
    wrote. `reward` and `exact` are (first, last) means an episode; `exact` is the share with gold's result.
    """

    steps: int
    ranks: tuple[int, ...]
    episodes: int
    sampled_tokens: int
    seconds: float
    window: int
    reward: tuple[float, float]
    exact: tuple[float, float]
    skipped_steps: int


class Training(StrictModel):
    """The record of a checkpoint that this project wrote: `step` steps were finished.

    `newest_step` is how far the run came, as its folder shows. `weights` is the trainer's fingerprint of the weights,
    `pool_hash` that of the questions. None where the run's folder has nothing to say.
    """

    checkpoint: str
    step: int
    newest_step: int
    pool_hash: str
    weights: str
    config: TrainConfig
    progress: Progress | None
    selection: Selection | None

    @property
    def finished(self) -> bool:
        """Whether the run took all the steps that its learning rate was planned for."""
        return self.newest_step >= self.config.schedule_steps


class CardRecord(StrictModel):
    """What a model card is written from, besides the export's own report and evaluation runs."""

    name: str
    base: Base
    training: Training | None


def card_record(name: str, base: Path, checkpoint: Path, say: Callable[[str], None]) -> CardRecord:
    """The records of an export `name` of `checkpoint` on `base`.

    A checkpoint from elsewhere has no training record, nor has one whose record cannot be read, about which `say` gets
    a line: a card can be written again, so that is no reason not to export.
    """
    try:
        training = read_training(checkpoint)
    except SetupError as error:
        say(f"the model card has no training record: {error}")
        training = None
    return CardRecord(name=name, base=read_base(base), training=training)


def read_base(folder: Path) -> Base:
    """What a base model's folder says about itself."""
    snapshot = _SNAPSHOT.search(folder.as_posix())
    hub_id = f"{snapshot['owner']}/{snapshot['name']}" if snapshot else None
    front = _front_matter(folder / "README.md")
    licence = {key: str(front[key]) for key in ("license", "license_name", "license_link") if front.get(key)}
    return Base(
        name=hub_id or folder.resolve().name,
        hub_id=hub_id,
        revision=snapshot["revision"] if snapshot else None,
        license_files=tuple(name for name in ("LICENSE", "NOTICE") if (folder / name).is_file()),
        **licence,
    )


def _front_matter(card: Path) -> Mapping[str, Any]:
    """The YAML head of a model card; empty where there is none that can be read."""
    try:
        head = _FRONT_MATTER.match(card.read_text(encoding="utf-8"))
        data = yaml.safe_load(head[1]) if head else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return data if isinstance(data, dict) else {}


def read_training(checkpoint: Path) -> Training | None:
    """The record of a complete checkpoint of this project, None for any other folder.

    SetupError when its state or its config cannot be read.
    """
    if why_incomplete(checkpoint) is not None:
        return None
    folder = checkpoint.resolve()  # `best` is a link
    try:
        # Mapped, not read: the optimizer's moments are twice the size of the model.
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=True)
        config = build_config(yaml.safe_load(state["config"]), TrainConfig, f"config of {folder / STATE}")
        step, pool_hash, weights = int(state["step"]), str(state["pool_hash"]), str(state["weights"])
    except (RuntimeError, KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise SetupError(f"{folder / STATE} cannot be read ({error}): export another checkpoint of the run") from None
    run = folder.parent if (folder.parent / CONFIG_COPY).is_file() else None
    lines = _metrics(run) if run is not None else []
    steps = [*(line["step"] + 1 for line in lines), *(n for n, _, why in list_checkpoints(folder.parent) if not why)]
    return Training(
        checkpoint=folder.name,
        step=step,
        newest_step=max([step, *steps]),
        pool_hash=pool_hash,
        weights=weights,
        config=config,
        progress=_progress([line for line in lines if line["step"] < step]),
        selection=_selection(run, step) if run is not None else None,
    )


def _metrics(run: Path) -> list[dict[str, Any]]:
    """The steps on record; none for a run that was stopped before its first one."""
    try:
        return read_metrics(run)
    except SetupError:
        return []


def _progress(lines: Sequence[Mapping[str, Any]]) -> Progress | None:
    if not lines:
        return None
    window = max(1, min(_WINDOW, len(lines) // 2))

    def mean(key: str, of: Sequence[Mapping[str, Any]]) -> float:
        return sum(float(line[key]) for line in of) / len(of)

    return Progress(
        steps=len(lines),
        ranks=tuple(sorted({int(line["ranks"]) for line in lines if "ranks" in line})),
        episodes=round(sum(line["episodes"] for line in lines)),
        sampled_tokens=round(sum(line["episodes"] * line["sampled_tokens"] for line in lines)),
        seconds=float(sum(line["seconds"] for line in lines)),
        window=window,
        reward=(mean("reward", lines[:window]), mean("reward", lines[-window:])),
        exact=(mean("exact", lines[:window]), mean("exact", lines[-window:])),
        skipped_steps=sum(bool(line.get("empty")) for line in lines),
    )


def _selection(run: Path, step: int) -> Selection | None:
    """None for a run that was never validated after a step."""
    lines = read_validation(run)
    same = [line for line in lines if line["step"] > 0 and line.get("key") == lines[-1].get("key")]
    if not same:
        return None
    best = best_line(run)
    own = [float(line["score"]) for line in same if line["step"] == step]
    return Selection(
        selected_on=str(same[-1]["selected_on"]),
        rounds=len(same),
        best_step=best["step"] if best else None,
        best_score=float(best["score"]) if best else None,
        score=own[-1] if own else None,
    )
