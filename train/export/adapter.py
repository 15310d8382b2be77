"""LoRA adapters as peft writes them: read, checked, and merged with the base matrix by matrix.

A folder with adapter_config.json and adapter_model.safetensors; for each changed matrix `NAME.weight` of the model it
holds A (rank x in) and B (out x rank) as `base_model.model.NAME.lora_A.weight` and `….lora_B.weight`. The merged
matrix is W + scaling * B A with scaling = alpha / rank (Hu et al. 2021, https://arxiv.org/abs/2106.09685), or
alpha / sqrt(rank) for rank-stabilised adapters (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import SetupError
from train.export.weights import TensorInfo, read_header, value_chunks

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_USED = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "init_lora_weights"}
# What says how the adapter was trained, or only means something along with a switch that is refused.
_WITHOUT_EFFECT = {
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "lora_dropout",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "ensure_weight_tying",
}
# Other ways to start (pissa, olora, loftq, corda, …) change the base's weights as well.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LowRank:
    """What an adapter adds to one matrix: scaling * B @ A, with A of shape (rank, in) and B of (out, rank)."""

    a: TensorInfo
    b: TensorInfo
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether B @ A has this shape."""
        return len(shape) == 2 and self.b.shape == (shape[0], self.rank) and self.a.shape == (self.rank, shape[1])


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter. SetupError when it holds a whole model as well: which one is meant?"""
    if not (folder / CONFIG).is_file():
        return False
    if any(path.name != WEIGHTS for path in folder.glob("*.safetensors")):
        raise SetupError(f"{folder} holds a whole model and a LoRA adapter ({CONFIG}); move one of them elsewhere")
    return True


def read_adapter(folder: Path) -> dict[str, LowRank]:
    """Name of the changed tensor, as the adapted model spells it -> what is added to it.

    Raises SetupError in one line for an adapter that is no plain LoRA, naming the setting, and for tensors that are
    not pairs of A and B.
    """
    alpha, rank, stabilised = _settings(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        raise SetupError(f"{folder} holds {CONFIG} but no {WEIGHTS}; save the adapter in that format")
    halves: dict[str, dict[str, TensorInfo]] = {}
    for tensor in read_header(folder / WEIGHTS).tensors:
        ending = next((ending for ending in (_A, _B) if tensor.name.endswith(ending)), None)
        if ending is None or not tensor.name.startswith(_PREFIX):
            raise SetupError(
                f"{tensor.name} of {folder} is no A or B of a LoRA matrix, and only those can be merged; export the "
                "merged model (merge_and_unload, save_pretrained) instead"
            )
        halves.setdefault(tensor.name.removeprefix(_PREFIX).removesuffix(ending) + ".weight", {})[ending] = tensor
    if not halves:
        raise SetupError(f"{folder / WEIGHTS} holds no tensor; give an adapter that was trained")
    found = {}
    for name, half in halves.items():
        if len(half) < 2:
            there, lacking = ("A", "B") if _A in half else ("B", "A")
            raise SetupError(f"{folder} has a LoRA {there} for {name} but no {lacking}; save the adapter again")
        own_rank = half[_A].shape[0] if half[_A].shape else 0
        if own_rank < 1 or (rank is not None and own_rank != rank):
            raise SetupError(
                f"the LoRA A for {name} in {folder} has {own_rank} rows, its {CONFIG} says r = {rank}; the two files "
                "are not of one adapter"
            )
        found[name] = LowRank(half[_A], half[_B], alpha / (math.sqrt(own_rank) if stabilised else own_rank))
    return found


def _settings(path: Path) -> tuple[float, int | None, bool]:
    """alpha, the rank (None where it is set matrix by matrix) and whether it is rank-stabilised."""
    try:
        config: Mapping[str, Any] = json.loads(path.read_bytes())
        kind, alpha, rank = str(config["peft_type"]), float(config["lora_alpha"]), int(config["r"])
    except (ValueError, KeyError, TypeError):
        raise SetupError(f"{path} is not the configuration of a LoRA adapter; save the adapter again") from None
    if kind != "LORA":
        raise SetupError(
            f"{path} says peft_type = {kind}, and only LORA can be merged; export the merged model instead"
        )
    refused = [
        key for key in config.keys() - _USED - _WITHOUT_EFFECT if config[key] not in (None, False, "none", {}, [])
    ]
    if config.get("init_lora_weights") not in _STARTS:
        refused.append("init_lora_weights")
    if refused:
        named = ", ".join(f"{key} = {config[key]}" for key in sorted(refused))
        raise SetupError(
            f"{path} says {named}, and only plain LoRA can be merged here; export the merged model (merge_and_unload, "
            "save_pretrained) instead"
        )
    return alpha, None if config.get("rank_pattern") else rank, bool(config.get("use_rslora"))


def merged_chunks(base: TensorInfo, low_rank: LowRank) -> Iterator[torch.Tensor]:
    """W + scaling * B @ A in float32, in flat pieces as value_chunks cuts them. Holds one matrix in memory.

    The product is of whole matrices and scaled afterwards: the same operations as peft's, so the same bits.
    """
    a, b = _whole(low_rank.a), _whole(low_rank.b)
    added = (b @ a).mul_(low_rank.scaling).flatten()
    start = 0
    for chunk in value_chunks(base):
        yield chunk.float() + added[start : start + chunk.numel()]
        start += chunk.numel()


def _whole(tensor: TensorInfo) -> torch.Tensor:
    return torch.cat([chunk.float() for chunk in value_chunks(tensor)]).view(tensor.shape)
