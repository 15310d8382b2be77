"""Load a model folder into the transformers engine. Local files only: nothing here reaches for the network."""

from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM

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
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            output_loading_info=True,
        )
        if missing := sorted(info["missing_keys"]):
            raise SetupError(
                f"{folder} lacks {len(missing)} weights of its model, {missing[0]} for one: copy all shards"
            )
        return HFEngine(model.to(device).eval(), weights=lambda: weights)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise SetupError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error


def library_versions() -> dict[str, str]:
    """The versions that decide what a transformers engine computes."""
    import transformers

    return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}
