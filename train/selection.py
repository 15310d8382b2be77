"""Which checkpoint is the best one, by the lines of validation.jsonl; and the files that say so.

`best` is a link to the checkpoint with the highest selection score, `best.json` says on what it was selected.
Both are derived from validation.jsonl and the checkpoints at hand, so a kill at any moment leaves nothing to mend.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shared.files import write_atomic
from train.checkpoint import checkpoint_folder, why_incomplete

VALIDATION = "validation.jsonl"
BEST = "best"
_OPTIMISM = (
    "The highest of several scores on one set is too high an estimate for a model: report accuracy on questions that "
    "had no part in the selection."
)


def read_validation(output: Path) -> list[dict[str, Any]]:
    """The readable lines of validation.jsonl in the order of the file; a line cut short by a kill is left out."""
    try:
        text = (output / VALIDATION).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int) and "score" in value:
            lines.append(value)
    return lines


def best_line(output: Path) -> dict[str, Any] | None:
    """The validation line with the highest score whose checkpoint is complete; the earliest of equal ones.

    The start (step 0) does not compete, nor do lines on other questions or settings than the newest one's: they
    cannot be compared.
    """
    lines = read_validation(output)
    best: dict[str, Any] | None = None
    for line in lines:
        if line["step"] == 0 or line.get("key") != lines[-1].get("key"):
            continue
        if why_incomplete(checkpoint_folder(output, line["step"])):
            continue
        if best is None or line["score"] > best["score"]:
            best = line
    return best


def beats_all(output: Path, line: Mapping[str, Any]) -> bool:
    """Whether `line`, of a trained model, scores higher than every comparable complete checkpoint before it."""
    others = [
        other
        for other in read_validation(output)
        if other.get("key") == line["key"]
        and 0 < other["step"] < line["step"]
        and why_incomplete(checkpoint_folder(output, other["step"])) is None
    ]
    return line["step"] > 0 and all(line["score"] > other["score"] for other in others)


def publish_best(output: Path, report: Callable[[str], None]) -> None:
    """Let `best` and `best.json` say what `best_line` says; both change in one rename each, or are removed."""
    line = best_line(output)
    link, note = output / BEST, output / f"{BEST}.json"
    if line is None:
        if link.is_symlink():
            link.unlink()
        note.unlink(missing_ok=True)
        return
    folder = checkpoint_folder(output, line["step"])
    try:
        fresh = output / f".{BEST}.new"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.name, target_is_directory=True)
        os.replace(fresh, link)
    except OSError as error:
        # Some file systems have no links; best.json names the folder all the same.
        report(f"{link} could not be written ({error}); the best checkpoint is {folder.name}")
    content = {
        "checkpoint": folder.name,
        "step": line["step"],
        "score": line["score"],
        "selected_on": line["selected_on"],
        "note": _OPTIMISM,
    }
    write_atomic(note, json.dumps(content, indent=1) + "\n")
