"""Where a base model or a checkpoint lies: a local folder, or a hub id that is downloaded (or found in the cache)."""

import re
import shlex
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
            f"{flag} {name} is no folder here and can't be had from the hub or its cache ({reason}); where there is a "
            f"network: hf download {name}; or give a local folder"
        ) from None


def checkpoint_folder(path: Path) -> Path:
    """The folder with the weights that `path` means: itself, or the newest complete checkpoint of a run's folder.

    Raises SetupError for a checkpoint whose writing was cut short, and for FSDP shards, which no trainer here writes.
    """
    if not any(path.glob("*.safetensors")):
        if (newest := newest_complete(path)) is not None:
            return newest[1]
        if (shards := fsdp_shards(path)) is not None:
            merged = path.resolve().with_name(f"{path.resolve().name}-merged")
            raise SetupError(
                f"{path} holds shards of torch.distributed.checkpoint, not whole tensors; join them first: "
                f"{shlex.join(('accelerate', 'merge-weights', str(shards), str(merged)))}"
            )
    if (path / MARKER).exists() and (problem := why_incomplete(path)) is not None:
        raise SetupError(f"{path} is not a complete checkpoint ({problem}); export an earlier one")
    return path


def fsdp_shards(path: Path) -> Path | None:
    """The folder in which FSDP (SHARDED_STATE_DICT) left a model in pieces: `path` or one in it; None without any.

    accelerate names the model's `pytorch_model_fsdp_0`; the optimizer has a folder of its own beside it.
    """
    for folder in [path, *sorted(inner for inner in path.iterdir() if inner.is_dir())]:
        if (folder / ".metadata").is_file() and any(folder.glob("*.distcp")) and "optim" not in folder.name:
            return folder
    return None
