"""Find a model folder and see that it is complete, before anything heavy is imported."""

import hashlib
import json
import re
from pathlib import Path

from shared.errors import SetupError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_IDENTITY_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_BLOCK = 1 << 22


def resolve_model(name: str) -> Path:
    """The folder that `name` means: a folder, or a hub id whose snapshot is in the local cache.

    Never downloads. Raises SetupError that says what to do.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise SetupError(f"model {name} is a file: give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise SetupError(f"model {name} does not exist: give a model folder, or a hub id (owner/name) you downloaded")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise SetupError(f"model {name} is no folder, and hub ids need: pip install 'execplan[eval]'") from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # the hub client raises many kinds; each means "not in the cache"
        raise SetupError(
            f"model {name} is neither a folder here nor in the local cache: download it first with `hf download {name}`"
        ) from error


def check_model_folder(folder: Path) -> None:
    """SetupError naming what `folder` lacks: config, weights, tokenizer or chat template."""
    if not (folder / "config.json").is_file():
        raise SetupError(f"model folder {folder} has no config.json: give the folder of a saved model")
    if not _weight_files(folder):
        raise SetupError(f"model folder {folder} has no weights (*.safetensors): copy them there")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise SetupError(f"model folder {folder} has no tokenizer (tokenizer.json): copy its base model's there")
    if not any((folder / name).is_file() for name in _TEMPLATE_FILES) and not _template_in_config(folder):
        raise SetupError(f"model folder {folder} has no chat template: copy its base model's chat_template.jinja there")


def check_context(folder: Path, max_tokens: int) -> None:
    """SetupError when an episode of `max_tokens` tokens is longer than what the model in `folder` can take."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{folder / 'config.json'} cannot be read ({error}): copy the model again") from None
    text = config.get("text_config") or config
    longest = text.get("max_position_embeddings")
    stretched = any("factor" in (text.get(key) or {}) for key in ("rope_scaling", "rope_parameters"))
    if isinstance(longest, int) and not stretched and longest < max_tokens:
        raise SetupError(
            f"model {folder} takes {longest} tokens, an episode may have {max_tokens}: give --max-tokens {longest}"
        )


def model_sha256(folder: Path) -> str:
    """Identity of what the folder computes: sha256 over names and bytes of weights, config, tokenizer and template."""
    digest = hashlib.sha256()
    names = {*_IDENTITY_FILES, *_TOKENIZER_FILES, *_TEMPLATE_FILES, "merges.txt"}
    for path in sorted({*_weight_files(folder), *(folder / name for name in names if (folder / name).is_file())}):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _template_in_config(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(isinstance(config, dict) and config.get("chat_template"))
