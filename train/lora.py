"""Low-rank adapters (LoRA): the start stays as it is, and only small matrices beside its linear layers are trained.

For a linear layer W (out, in): y = W x + (alpha / rank) B A x, with A (rank, in) and B (out, rank) in float32, and B
zero at the start. With the adapters off the model is the start, so the KL reference is no second copy
(`without_adapters`).

peft puts the adapters into the text model in place: whatever reads the model's parts finds them where they were. To all
others the policy looks merged: W + (alpha / rank) B A, computed in float32 and rounded once to W's dtype
(train/live.py). A checkpoint is the merged model folder plus `adapter/` as peft writes it, which is what a run resumes
from.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from shared.engines.tokenizer import first_line
from shared.errors import SetupError
from train.config import LoraConfig

ADAPTER = "adapter"
_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
# What peft puts before the names of a model that it has wrapped.
_PREFIX = "base_model.model."


def linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of all linear layers inside the decoder: what "all-linear" means."""
    decoder = model.get_decoder()  # type: ignore[operator]
    return sorted(
        {name.rpartition(".")[2] for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    )


def check_targets(folder: Path, config: LoraConfig) -> None:
    """SetupError when a target is no linear layer of the model in `folder`; reads its config alone."""
    try:
        text = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
        with torch.device("meta"):
            known = linear_names(AutoModelForCausalLM.from_config(text))
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path: {folder} cannot be read: {first_line(error)}") from error
    if config.targets != "all-linear" and (unknown := sorted(set(config.targets) - set(known))):
        raise SetupError(f"model.lora.targets: no linear layer is named {unknown[0]}; there are {', '.join(known)}")


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put fresh adapters into `model`, in place, and freeze all else. A is drawn from torch's own generator."""
    from peft import inject_adapter_in_model  # takes a while, and most runs have no adapters

    targets = linear_names(model) if config.targets == "all-linear" else list(config.targets)
    inject_adapter_in_model(_peft_config(config, targets), model, adapter_name=_NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            # Small steps on numbers near zero: never in bfloat16, whatever the model is in.
            parameter.data = parameter.data.float()


def _peft_config(config: LoraConfig, targets: list[str], base: str | None = None) -> Any:
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's modules that hold a linear layer and its adapter, by name; empty for a model without any."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """W + (alpha / rank) B A in float32, rounded to W's dtype; shape (out, in)."""
    base = layer.base_layer.weight.detach()
    a, b = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
    merged: Tensor = base.float() + (b.float() @ a.float()) * layer.scaling[_NAME]
    return merged.to(base.dtype)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes what the start does, bit for bit."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model: nn.Module, config: LoraConfig, base: str, folder: Path) -> None:
    """Write `folder` as peft's own `save_pretrained` does: `base` is what the adapters were trained on."""
    folder.mkdir()
    targets = sorted({name.rpartition(".")[2] for name in adapted_layers(model)})
    _peft_config(config, targets, base).save_pretrained(str(folder))
    tensors = {_saved_name(name): p.detach().cpu().contiguous() for name, p in _adapters(model)}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Take over what `save_adapter` wrote. SetupError when it was written with other settings, or is not there."""
    path = folder / _WEIGHTS
    if not path.is_file():
        raise SetupError(f"{folder} is not there: the run was trained without model.lora; use another output")
    saved: dict[str, Tensor] = load_file(path)
    own = {_saved_name(name): parameter for name, parameter in _adapters(model)}
    if {name: p.shape for name, p in own.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        raise SetupError(f"{folder} has adapters of another rank or other targets than model.lora says; restore those")
    for name, parameter in own.items():
        parameter.copy_(saved[name])


def _adapters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if is_adapter(name)]


def _saved_name(name: str) -> str:
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def unadapted_name(name: str) -> str:
    """The text model's own name of a parameter of an adapted one."""
    return name.replace(".base_layer.", ".")
