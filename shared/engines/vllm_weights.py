"""A loaded vLLM model's weights, as its kernels have them.

Parameters alone prove little. vLLM's CPU build packs matrices for its kernels and empties the parameters, and a tied
output head has a packed copy of its own. So what has been packed is read through the kernel: a product with the
identity gives a matrix back, exactly, since each sum has one term that is not zero.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Numbers in one product with a part of the identity: 256 MiB of bfloat16.
_PRODUCT = 1 << 27
_CHUNK = 1 << 22
_MASK = (1 << 64) - 1


def repack_tied_heads(model: Any) -> None:
    """Pack tied output heads again: nothing is loaded into them, so vLLM (0.32) leaves their old packed copy in place.

    The logits of the CPU build would come from the old embedding. Elsewhere nothing is packed.
    """
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not hasattr(module, "cpu_linear"):
            continue
        if weight.numel() and owners.setdefault(id(weight), module) is not module:
            module.quant_method.process_weights_after_loading(module)


def kernel_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by its name in vLLM, shared ones under each of their names, as the kernels have them.

    Matrices are (output rows, input columns), a causal convolution's weight is (channels, width) or (channels, 1,
    width). The sign of a zero may differ from what was loaded.
    """
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            tensor = parameter.detach()
            if name == "weight" and hasattr(module, "cpu_linear") and not tensor.is_meta:
                tensor = _through_kernel(module, tensor)
            elif name == "weight" and hasattr(module, "_cpu_unpacked_conv_weight"):
                tensor = _unpacked_convolution(tensor)
            yield f"{prefix}.{name}" if prefix else name, tensor


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits that change when any number of the tensor does, or any two unequal ones swap places.

    sum over i of (2 i + 1) x (word i) mod 2^64, where word i is the bit pattern of number i in row-major order; the
    same on every device. A zero's sign does not count.
    """
    flat, total = tensor.detach().reshape(-1), 0
    for first in range(0, flat.numel(), _CHUNK):
        numbers = flat[first : first + _CHUNK] + 0
        words = numbers.view(torch.int16 if numbers.element_size() == 2 else torch.int32).long()
        places = 2 * torch.arange(first, first + len(words), device=words.device) + 1
        total += int((words * places).sum())
    return total & _MASK


@torch.no_grad()
def _through_kernel(module: Any, weight: Tensor) -> Tensor:
    """The matrix that `module.cpu_linear` multiplies with."""
    columns = weight.shape[1] if weight.ndim == 2 else module.input_size_per_partition
    identity = torch.eye(columns, dtype=weight.dtype)
    first = module.cpu_linear(identity[:1], weight, None)
    step = max(1, _PRODUCT // first.shape[1])
    parts = [module.cpu_linear(identity[i : i + step], weight, None) for i in range(0, columns, step)]
    return torch.cat(parts).T


def _unpacked_convolution(packed: Tensor) -> Tensor:
    """Undo vLLM's packing of a (channels, width) weight for its AVX-512 or ARM kernels.

    Packing only moves numbers: packing their positions, as bit patterns, says where each went.
    """
    from vllm import _custom_ops

    count = packed.numel()
    if count > 1 << 16:
        raise NotImplementedError(f"a packed convolution of {count} numbers cannot be read back: positions are 16 bits")
    positions = torch.arange(count).to(torch.int16).view(torch.bfloat16).view(packed.shape)
    moved = _custom_ops.causal_conv1d_weight_pack(positions).view(torch.int16).flatten().long() % (1 << 16)
    original = torch.empty(count, dtype=packed.dtype)
    original[moved] = packed.flatten()
    return original.view(packed.shape)
