"""Which weights an episode was sampled from.

The HF engine shares the trainer's model object, so there is nothing to copy; what remains is the proof that an
episode came from the weights it is trained on.
"""

import hashlib

import torch
from torch import nn


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """16 hex digits that change when any parameter's bits do, up to rearrangements within one tensor.

    Per tensor: the sum of its 16- or 32-bit words as integers, which no order of addition can change.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        data = parameter.detach().contiguous()
        words = data.view(torch.int16 if data.element_size() == 2 else torch.int32)
        digest.update(f"{name}:{int(words.sum(dtype=torch.int64))};".encode())
    return digest.hexdigest()[:16]
