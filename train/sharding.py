"""FSDP: each rank keeps a part of every tensor, of its gradient and of its optimizer state.

torch's own `fully_shard` (FSDP2), one group of parameters a decoder layer and one for the rest: a layer is gathered
when it is computed and given up again. It runs on gloo and the CPU as on NCCL and GPUs, which accelerate's wrapper
around it does not. Gradients are averaged over the ranks as DDP does, so a step's result is the same to rounding.

A sharded model cannot sample: rollout engines have weights of their own or get a `WholeCopy`. Checkpoints hold
whole tensors (train/live.py): they do not depend on the number of ranks, nor on FSDP.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from train.live import live_tensors, whole


def shard(model: nn.Module, decoder: nn.Module, accelerator: Accelerator) -> None:
    """Shard `model`, in place, over all ranks and onto their devices; `decoder.layers` are groups of their own."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    layers = decoder.layers
    assert isinstance(layers, nn.ModuleList)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is spread over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(state: dict[str, Any], keep: bool) -> dict[str, Any]:
    """An optimizer's state_dict with whole tensors on the CPU; a collective where it is sharded.

    Ranks with `keep` false take part in gathering and let go of each tensor at once: they get nothing.
    """

    def gathered(value: Any) -> Any:
        if isinstance(value, DTensor):
            full = whole(value)
            return full.cpu() if keep else None
        return value

    moments = {
        index: {name: gathered(value) for name, value in values.items()} for index, values in state["state"].items()
    }
    return state | {"state": moments} if keep else {}


def sharded_state(state: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """`whole_state` the other way: each moment laid out as its parameter is. The inverse on every rank.

    `parameters` are the optimizer's, in the order of its groups.
    """

    def laid_out(value: Any, parameter: Tensor) -> Any:
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
            moved = value.to(parameter.device)
            return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
        return value

    moments = {
        index: {name: laid_out(value, parameters[index]) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return state | {"state": moments}


class WholeCopy:
    """A second, unsharded model on each rank's device that follows a sharded one: what the HF engine samples from.

    It takes the memory that sharding saves, once for the weights: for small models and for checks. vLLM needs none.
    """

    def __init__(self, source: nn.Module, copy: nn.Module, device: torch.device) -> None:
        """`copy` has the same architecture and names; what it holds is overwritten by the first `refresh`."""
        self.model = copy.to(device).eval().requires_grad_(False)
        self._source = source

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the source's present weights; all ranks call it."""
        own = dict(self.model.named_parameters())
        for name, live in live_tensors(self._source).items():
            own[name].copy_(live.value())
