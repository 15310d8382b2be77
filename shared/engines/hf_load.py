"""Load a model folder into the transformers engine. Local files only: nothing here reaches for the network."""

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.engines.hf import HFEngine
from shared.engines.tokenizer import first_line
from shared.errors import SetupError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


def load_engine(folder: Path, *, weights: str, dtype: Dtype = "auto", device: str | None = None) -> HFEngine:
    """The causal language model of `folder` as an engine; `weights` names them in every completion.

    `dtype` "auto" is the checkpoint's own; `device` None is the GPU where there is one. SetupError when
    the folder cannot be loaded, or lacks weights that transformers would fill with random numbers.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_causal_lm(folder, dtype=dtype)
    try:
        return HFEngine(model.to(device), weights=lambda: weights)
    except (ValueError, RuntimeError) as error:
        raise SetupError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error


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
