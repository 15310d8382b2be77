"""Loading the policy and saving it again, as transformers folders.

A Qwen3.5 base folder holds a vision tower and an MTP head besides the language model; the text class loads the
language model alone. The saved folder is a text model; scripts/export_merged.py puts the rest back.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from shared.chat import TokenizerCodec
from shared.engines.hf_load import load_causal_lm
from shared.engines.tokenizer import first_line, load_tokenizer
from shared.engines.weight_files import refuse_damaged
from shared.errors import SetupError
from train.config import ModelConfig
from train.export.weights import read_header, value_chunks
from train.lora import ADAPTER, add_adapters, load_adapter

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Policy:
    """A loaded model with the tokenizer and chat codec of its folder."""

    model: PreTrainedModel
    tokenizer: Any
    codec: TokenizerCodec


def check_model_path(path: str) -> None:
    """SetupError unless `path` is a folder with a whole model in it, or looks like a hub id (owner/name)."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"model.path: {path} has no config.json; give a model folder")
        if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
            raise SetupError(f"model.path: {path} has no weights (*.safetensors); give a complete model folder")
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
            raise SetupError(f"model.path: {path} has no tokenizer; copy the tokenizer files of its base there")
        try:
            refuse_damaged(folder)
        except SetupError as error:
            raise SetupError(f"model.path: {error}") from None
    elif not _HUB_ID.fullmatch(path) or path.startswith("."):
        raise SetupError(f"model.path: {path} is neither a folder nor a hub id (owner/name)")


def model_folder(path: str, revision: str | None = None) -> Path:
    """The folder itself, or where the hub's cache has the repository (fetched first unless HF_HUB_OFFLINE is set).

    From here on everything is read from local files: transformers would otherwise ask the hub for optional ones.
    SetupError when it is neither.
    """
    check_model_path(path)
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=_HUB_FILES))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"model.path: {path} is no folder, and the hub's cache does not have it ({first_line(error)}); "
            f"where there is a network: hf download {path}"
        ) from error


def load_codec(path: str, revision: str | None = None) -> tuple[Any, TokenizerCodec]:
    """The tokenizer of a model and its chat codec. SetupError when there is none, or its template is unfit."""
    tokenizer = load_tokenizer(model_folder(path, revision))
    return tokenizer, TokenizerCodec(tokenizer)


def load_model(config: ModelConfig, path: str | None = None) -> PreTrainedModel:
    """The causal language model of `path` (default: the config's start), on the CPU, in evaluation mode.

    SetupError when it cannot be loaded, or when the folder lacks some of its weights.
    """
    folder = model_folder(config.path, config.revision) if path is None else model_folder(path)
    try:
        model = load_causal_lm(folder, dtype=config.dtype, attn_implementation=config.attention)
    except SetupError as error:
        raise SetupError(f"model.path: {error}") from error
    if config.dtype != "float32":
        _keep_float32(model, folder)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _keep_float32(model: PreTrainedModel, folder: Path) -> None:
    """Undo transformers' cast of what a folder stores in float32 beside narrower tensors: Qwen3.5's A_log and norms."""
    own = dict(model.named_parameters())
    stored = [tensor for file in sorted(folder.glob("*.safetensors")) for tensor in read_header(file).tensors]
    if all(tensor.dtype == "F32" for tensor in stored):
        return
    for tensor in stored:
        parameter = own.get(tensor.name.replace("model.language_model.", "model."))
        if parameter is not None and tensor.dtype == "F32":
            parameter.data = torch.cat(list(value_chunks(tensor))).reshape(tensor.shape)


def load_policy(config: ModelConfig, path: str | None = None) -> Policy:
    """Model, tokenizer and codec of the config's start, or of `path` (a checkpoint of ours).

    With adapters the model is always the start, with fresh ones or those of the checkpoint. SetupError when the
    checkpoint was trained the other way.
    """
    tokenizer, codec = load_codec(path or config.path, config.revision if path is None else None)
    if config.lora is None:
        if path is not None and (Path(path) / ADAPTER).is_dir():
            raise SetupError(f"{path} was trained with model.lora; restore it, or use another output")
        return Policy(load_model(config, path), tokenizer, codec)
    model = load_model(config)
    add_adapters(model, config.lora)
    if path is not None:
        load_adapter(model, Path(path) / ADAPTER)
    return Policy(model, tokenizer, codec)


def save_policy(policy: Policy, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write a folder that `load_policy` and transformers read: weights, configs, tokenizer and chat template.

    `weights`: by name, where those that the model holds are not whole (train/live.py).
    """
    policy.model.save_pretrained(folder, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)
