"""The policy's weights as a sampler or a file needs them: whole tensors, under the text model's own names.

Between the optimizer's parameters and those stands what the run does with them: under FSDP each rank holds a part of
every tensor. All who hand weights on (the sync, the proof, the checkpoints) read them here.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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
    return {name: _live(parameter) for name, parameter in model.named_parameters()}


def _live(parameter: nn.Parameter) -> LiveTensor:
    @torch.no_grad()
    def value() -> Tensor:
        return whole(parameter)

    return LiveTensor(tuple(parameter.shape), value)
