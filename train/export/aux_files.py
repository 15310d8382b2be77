"""The files of an export that are not weights: taken from the base as they are, but for the stop ids."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.errors import SetupError

# Where a turn ends, and where a document does: what sampling in training stopped on.
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json", CHAT_TEMPLATE)
REQUIRED_FOR_VISION = ("preprocessor_config.json", "video_preprocessor_config.json")
OPTIONAL = (
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "LICENSE",
    "NOTICE",
)


def plan_aux_files(base: Path, checkpoint: Path) -> dict[str, bytes]:
    """File name -> content of everything but the weights.

    Raises SetupError naming what the base lacks, or when the checkpoint was trained with another tokenizer or chat
    template than the base's: a server of the export would show the model other prompts than it was trained on.
    """
    config = read_json(base / "config.json")
    required = REQUIRED + (REQUIRED_FOR_VISION if "vision_config" in config else ())
    for name in required:
        if not (base / name).is_file():
            raise SetupError(f"{base} lacks {name}, which a server needs; copy or download the whole base model")
    _check_same_text_side(base, checkpoint)
    names = [*required, *(name for name in OPTIONAL if (base / name).is_file())]
    files = {name: (base / name).read_bytes() for name in names}
    files[GENERATION_CONFIG] = generation_config(base, stop_token_ids(base))
    return files


def _check_same_text_side(base: Path, checkpoint: Path) -> None:
    template, tokenizer = checkpoint / CHAT_TEMPLATE, checkpoint / "tokenizer.json"
    if template.is_file() and template.read_text().strip() != (base / CHAT_TEMPLATE).read_text().strip():
        raise SetupError(
            f"{template} differs from the base's {base / CHAT_TEMPLATE}; give the base that the run was started from"
        )
    if (
        tokenizer.is_file()
        and _load_tokenizer(tokenizer).get_vocab() != _load_tokenizer(base / "tokenizer.json").get_vocab()
    ):
        raise SetupError(
            f"{tokenizer} has other tokens than the base's tokenizer; give the base that the run was started from"
        )


def _load_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise SetupError(f"{path} can't be read as a tokenizer ({error}); copy or download it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises SetupError when it is missing or no object."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SetupError(f"{path} does not exist; give the folder of a model, with its configuration") from None
    except ValueError:
        raise SetupError(f"{path} is not JSON; copy or download it again") from None
    if not isinstance(value, dict):
        raise SetupError(f"{path} holds no JSON object; copy or download it again")
    return value


def stop_token_ids(base: Path) -> list[int]:
    """The ids of STOP_TOKENS in the base's own tokenizer."""
    path = base / "tokenizer.json"
    tokenizer = _load_tokenizer(path)
    ids = {token: tokenizer.token_to_id(token) for token in STOP_TOKENS}
    for token, token_id in ids.items():
        if token_id is None:
            raise SetupError(
                f"{path} has no token {token}, on which generation must stop; use the base model's own tokenizer"
            )
    return [token_id for token_id in ids.values() if token_id is not None]


def generation_config(base: Path, stop_ids: list[int]) -> bytes:
    """The base's generation config with `stop_ids` as its stops; the base's own bytes where it has them already."""
    path = base / GENERATION_CONFIG
    config = read_json(path) if path.is_file() else {}
    if config.get("eos_token_id") == stop_ids:
        return path.read_bytes()
    config["eos_token_id"] = stop_ids
    config.setdefault("pad_token_id", stop_ids[-1])
    return (json.dumps(config, indent=2) + "\n").encode()
