"""Checkpoints that are either complete or not there, and the choice of the one to resume from.

`checkpoint-step-N/` is a model folder that transformers loads (weights, config, tokenizer, chat template, generation
config), plus `train_state.pt`, plus `complete.json`, the list of all files with their sizes. It is
written under another name, flushed to disk, and renamed. Anything without a `complete.json` that
matches is ignored, and never deleted by us unless it is our own unfinished writing.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError

from shared.errors import SetupError
from shared.files import flush

MARKER = "complete.json"
STATE = "train_state.pt"
_NAME = re.compile(r"checkpoint-step-(\d+)")
_UNFINISHED = ".unfinished-"


def checkpoint_folder(output: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return output / f"checkpoint-step-{step}"


def why_incomplete(folder: Path) -> str | None:
    """None for a complete checkpoint, else what is wrong with it."""
    try:
        listed = json.loads((folder / MARKER).read_text(encoding="utf-8"))["files"]
    except FileNotFoundError:
        return f"no {MARKER}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MARKER} cannot be read"
    if not isinstance(listed, dict) or STATE not in listed:
        return f"{MARKER} does not list {STATE}"
    for name, size in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
    return None


def list_checkpoints(output: Path) -> list[tuple[int, Path, str | None]]:
    """(step, folder, why incomplete or None) of everything named like a checkpoint, by ascending step."""
    found = []
    for path in output.iterdir() if output.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path, why_incomplete(path)))
    return sorted(found)


def newest_complete(output: Path, report: Callable[[str], None] = lambda line: None) -> tuple[int, Path] | None:
    """The complete checkpoint with the highest step; says about each newer one why it was passed over."""
    for step, path, problem in reversed(list_checkpoints(output)):
        if problem is None:
            return step, path
        report(f"{path.name} is not complete ({problem}); looking further back")
    return None


def write_checkpoint(output: Path, step: int, write: Callable[[Path], None], *, bytes_needed: int = 0) -> Path:
    """Have `write` fill a folder and make it `checkpoint-step-<step>`, all or nothing.

    A complete one already there is left as it is; an incomplete one of that name is replaced.

    Raises SetupError when the disk has less than `bytes_needed` free, or fills up while writing; nothing that looks
    complete is left behind then.
    """
    target = checkpoint_folder(output, step)
    if target.is_dir() and why_incomplete(target) is None:
        return target
    output.mkdir(parents=True, exist_ok=True)
    remove_unfinished(output)
    free = shutil.disk_usage(output).free
    if free < bytes_needed:
        raise SetupError(
            f"checkpoint of step {step}: {output} has {free / 2**20:.0f} MiB free, {bytes_needed / 2**20:.0f} MiB are "
            "needed; free some space and start again to continue from the last complete checkpoint"
        )
    writing = output / f"{_UNFINISHED}{target.name}"
    writing.mkdir()
    try:
        write(writing)
        files = sorted(path for path in writing.rglob("*") if path.is_file())
        for path in files:
            flush(path)
        listing = {path.relative_to(writing).as_posix(): path.stat().st_size for path in files}
        marker = writing / MARKER
        marker.write_text(json.dumps({"step": step, "files": listing}, indent=1), encoding="utf-8")
        flush(marker)
    except (OSError, RuntimeError, SafetensorError) as error:
        # A disk that is full is an OSError to Python, a RuntimeError to torch.save, and safetensors has its own.
        shutil.rmtree(writing, ignore_errors=True)
        raise SetupError(f"checkpoint of step {step} could not be written to {output}: {error}") from error
    if target.exists():
        shutil.rmtree(target)
    os.replace(writing, target)
    flush(output)
    return target


def remove_unfinished(output: Path) -> None:
    """Delete what a killed save left under its temporary name."""
    for path in output.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def apply_retention(output: Path, keep: int, keep_steps: Sequence[int] = ()) -> list[Path]:
    """Delete complete checkpoints beyond the newest `keep` and `keep_steps`; returns what was deleted.

    Incomplete folders are neither counted nor touched, and the newest complete one always stays.
    """
    complete = [(step, path) for step, path, problem in list_checkpoints(output) if problem is None]
    spare = complete[: -max(keep, 1)]
    deleted = []
    for step, path in spare:
        if step not in keep_steps:
            # Without its marker first: a deletion that is cut short must not leave a folder that looks complete.
            (path / MARKER).unlink()
            shutil.rmtree(path)
            deleted.append(path)
    return deleted
