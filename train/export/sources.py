"""Where a base model or a checkpoint lies: a local folder, or a hub id that is downloaded (or found in the cache)."""

import re
from pathlib import Path

from shared.errors import SetupError
from train.checkpoint import MARKER, newest_complete, why_incomplete

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE", "NOTICE", "README.md"]


def model_folder(name: str, flag: str) -> Path:
    """The folder that `name` means: itself when it exists, else the hub's snapshot of that id.

    Raises SetupError naming `flag` when there is neither.
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists() or not _HUB_ID.fullmatch(name):
        raise SetupError(f"{flag} {name} is neither a folder nor a hub id (owner/name); correct it")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises many kinds, and all of them mean the same to a user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise SetupError(
            f"{flag} {name} is no folder here and can't be had from the hub ({reason}); give a local folder"
        ) from None


def checkpoint_folder(path: Path) -> Path:
    """The folder with the weights that `path` means: itself, or the newest complete checkpoint of a run's folder.

    Raises SetupError for a checkpoint whose writing was cut short.
    """
    if not any(path.glob("*.safetensors")) and (newest := newest_complete(path)) is not None:
        return newest[1]
    if (path / MARKER).exists() and (problem := why_incomplete(path)) is not None:
        raise SetupError(f"{path} is not a complete checkpoint ({problem}); export an earlier one")
    return path
