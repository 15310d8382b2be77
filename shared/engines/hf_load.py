"""Load a model folder into the transformers engine. Local files only: nothing here reaches for the network."""

import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.engines.hf import HFEngine
from shared.engines.tokenizer import first_line
from shared.errors import SetupError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# The package whose kernels transformers takes for linear-attention layers, by the name that is imported.
_KERNELS = "fla"


def load_engine(folder: Path, *, weights: str, dtype: Dtype = "auto", device: str | None = None) -> HFEngine:
    """The causal language model of `folder` as an engine; `weights` names them in every completion.

    `dtype` "auto" is the checkpoint's own; `device` None is the GPU where there is one. SetupError when
    the folder cannot be loaded, or lacks weights that transformers would fill with random numbers.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hide_kernels(device)
    model = load_causal_lm(folder, dtype=dtype)
    try:
        return HFEngine(model.to(device), weights=lambda: weights)
    except (ValueError, RuntimeError) as error:
        raise SetupError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error


def hide_kernels(device: str) -> None:
    """For a model on the CPU, hide flash-linear-attention from transformers, which would call its GPU kernels there.

    transformers chooses when a model's module is first imported, by whether the package can be: call this before.
    """
    if device == "cpu":
        sys.modules.setdefault(_KERNELS, None)  # type: ignore[arg-type]


def missing_kernels(config: Any, device: str) -> str | None:
    """What to install for the linear-attention layers of a transformers config on a GPU; None when nothing is missing.

    Without the package they run in transformers' readable reference: right, and many times slower.
    """
    layers = getattr(config.get_text_config(), "layer_types", None) or ()
    if device != "cuda" or "linear_attention" not in layers or importlib.util.find_spec(_KERNELS) is not None:
        return None
    return (
        "flash-linear-attention is not installed: the linear-attention layers will run in plain PyTorch, many times "
        "slower than its kernels; on the GPU node: pip install -e '.[gpu]'"
    )


def load_causal_lm(folder: Path, *, dtype: Dtype, **settings: Any) -> PreTrainedModel:
    """The causal language model of `folder`, on the CPU, in evaluation mode; `settings` go to transformers.

    SetupError when it cannot be loaded, or when the folder lacks some of its weights: transformers would fill
    those with random numbers.
    """
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
            **settings,
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise SetupError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(info["missing_keys"]):
        raise SetupError(f"{folder} lacks {len(missing)} weights of its model, {missing[0]} for one: copy all shards")
    loaded: PreTrainedModel = model.eval()
    return loaded


def library_versions() -> dict[str, str]:
    """The versions that decide what a transformers engine computes."""
    import transformers

    return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}
