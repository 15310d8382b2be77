"""The policy's weights as a sampler or a file needs them: whole tensors, under the text model's own names.

Between the optimizer's parameters and those stands what the run does with them: under FSDP each rank holds a part of
every tensor, with LoRA the trained matrices stand beside the frozen ones. All who hand weights on (the sync, the
proof, the checkpoints) read them here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from train.lora import adapted_layers, is_adapter, merged_weight, unadapted_name


@dataclass(frozen=True)
class LiveTensor:
    """One tensor: its whole shape, and `value()` that makes it. Under FSDP `value` is a collective of all ranks."""

    shape: tuple[int, ...]
    value: Callable[[], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it gathered from its shards (a collective); without gradient."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def live_tensors(model: nn.Module) -> dict[str, LiveTensor]:
    """Name -> tensor of everything the model holds, in the model's order; a tied head is not among them."""
    adapted = adapted_layers(model)
    found: dict[str, LiveTensor] = {}
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".base_layer.")
        if layer in adapted and kind == "weight":
            found[unadapted_name(name)] = _merged(adapted[layer])
        elif not is_adapter(name):
            found[unadapted_name(name)] = _live(parameter)
    return found


def _merged(layer: Any) -> LiveTensor:
    return LiveTensor(tuple(layer.base_layer.weight.shape), lambda: merged_weight(layer))


def _live(parameter: nn.Parameter) -> LiveTensor:
    @torch.no_grad()
    def value() -> Tensor:
        return whole(parameter)

    return LiveTensor(tuple(parameter.shape), value)
