"""The optimizer and its learning rate."""

import importlib.util
import math
from typing import Any

import torch
from torch import nn

from shared.errors import SetupError
from train.config import OptimizerConfig


def lr_scale(step: int, total: int, config: OptimizerConfig) -> float:
    """Factor on the learning rate at step `step` (from 0) of `total`.

    Warm-up: w = ceil(warmup_share * total) steps, linear from 1/w to 1. Then cosine to `final_lr_share` at `total`
    (or constant 1). A pure function of the step, so there is no scheduler state to save.
    """
    warmup = math.ceil(config.warmup_share * total)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    done = min((step - warmup) / max(total - warmup, 1), 1.0)
    return config.final_lr_share + (1.0 - config.final_lr_share) * 0.5 * (1.0 + math.cos(math.pi * done))


class Optimizers:
    """One or two torch optimizers stepped as one."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts
        for part in parts.values():
            for group in part.param_groups:
                group["base_lr"] = group["lr"]

    def set_scale(self, scale: float) -> None:
        """Set every group's learning rate to its base times `scale`."""
        for part in self.parts.values():
            for group in part.param_groups:
                group["lr"] = group["base_lr"] * scale

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments; learning rates stay those of this run's config."""
        for name, part in self.parts.items():
            kept = [(group["lr"], group["base_lr"]) for group in part.param_groups]
            part.load_state_dict(state[name])
            for group, (lr, base) in zip(part.param_groups, kept, strict=True):
                group["lr"], group["base_lr"] = lr, base


def check_optimizer(config: OptimizerConfig) -> None:
    """SetupError when the optimizer's package is missing; asked before anything is loaded."""
    if config.name == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise SetupError("optimizer.name: adamw8bit needs bitsandbytes: pip install bitsandbytes")


def build_optimizers(model: nn.Module, config: OptimizerConfig) -> Optimizers:
    """AdamW over everything (its moments in 8 bits if so named), or Muon over hidden matrices and AdamW over the rest.

    Muon takes the two-dimensional weights inside the decoder layers; embeddings, the output projection,
    norms, convolutions and biases go to AdamW.
    """
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = getattr(model, "lm_head", None)
    if isinstance(head, nn.Module):
        embeddings |= {id(p) for p in head.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and id(p) not in embeddings] if config.name == "muon" else []
    taken = {id(p) for p in matrices}
    rest = [p for p in trained if id(p) not in taken]
    parts: dict[str, torch.optim.Optimizer] = {}
    adamw: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    if config.name == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit

        parts["adamw8bit"] = AdamW8bit(rest, **adamw)
    elif rest:
        parts["adamw"] = torch.optim.AdamW(rest, fused=config.fused, **adamw)
    if matrices:
        parts["muon"] = torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=config.weight_decay)
    return Optimizers(parts)
