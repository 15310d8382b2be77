"""A run's state on disk: what a checkpoint holds besides the model, and when it may be continued."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.config import dump_config
from shared.errors import SetupError
from train.checkpoint import STATE, apply_retention, write_checkpoint
from train.config import TrainConfig
from train.live import live_tensors
from train.lora import ADAPTER, adapted_layers, save_adapter
from train.model import Policy, save_policy
from train.selection import best_line
from train.sharding import is_sharded, sharded_state, whole_state
from train.trainer import Trainer

# Saved files take this much more than parameters and moments (headers, tokenizer, config).
_SLACK = 16 * 2**20


@dataclass(frozen=True)
class Resumed:
    """Where to go on: the number of finished steps, and the trainer's state to load."""

    step: int
    folder: Path
    state: dict[str, Any]


def read_state(step: int, folder: Path, config: TrainConfig, pool_hash: str) -> Resumed:
    """The train state of a complete checkpoint. SetupError when it belongs to other data or another seed."""
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if state["pool_hash"] != pool_hash:
        raise SetupError(
            f"{folder} was trained on another question pool; restore the data, or give another folder as output="
        )
    if state["seed"] != config.seed:
        raise SetupError(
            f"{folder} was trained with seed {state['seed']}, the config says {config.seed}; use another output="
        )
    return Resumed(step, folder, state)


def restore(trainer: Trainer, resumed: Resumed) -> None:
    """Put optimizer moments and KL coefficient back. RuntimeError if the loaded weights are not the saved ones."""
    if trainer.weights != resumed.state["weights"]:
        raise RuntimeError(
            f"{resumed.folder}: the loaded weights have fingerprint {trainer.weights}, "
            f"saved were {resumed.state['weights']}"
        )
    parts = trainer.optimizers.parts
    trainer.optimizers.load_state_dict(
        {
            name: sharded_state(state, [p for group in parts[name].param_groups for p in group["params"]])
            for name, state in resumed.state["optimizers"].items()
        }
    )
    trainer.kl_coefficient = resumed.state["kl_coefficient"]


@dataclass(frozen=True)
class Gathered:
    """What a checkpoint takes from the ranks: weights by name (None: the model's own as they are), optimizer states."""

    weights: dict[str, torch.Tensor] | None
    optimizers: dict[str, Any]


def gather_run(trainer: Trainer, keep: bool) -> Gathered:
    """The trainer's tensors, whole. All ranks call it; the one that writes the checkpoint has `keep` true."""
    weights: dict[str, torch.Tensor] | None = None
    if is_sharded(trainer.model) or adapted_layers(trainer.model):
        weights = {}
        for name, live in live_tensors(trainer.model).items():
            value = live.value()
            if keep:
                weights[name] = value.cpu()
    optimizers = {name: whole_state(part.state_dict(), keep) for name, part in trainer.optimizers.parts.items()}
    return Gathered(weights, optimizers)


def save_run(
    config: TrainConfig, step: int, trainer: Trainer, policy: Policy, pool_hash: str, gathered: Gathered
) -> Path:
    """Write the checkpoint after `step` finished steps and delete what retention lets go. Main process only."""

    def write(folder: Path) -> None:
        save_policy(policy, folder, gathered.weights)
        if config.model.lora is not None:
            save_adapter(policy.model, config.model.lora, config.model.path, folder / ADAPTER)
        state = {
            "step": step,
            "seed": config.seed,
            "pool_hash": pool_hash,
            "weights": trainer.weights,
            "kl_coefficient": trainer.kl_coefficient,
            "optimizers": gathered.optimizers,
            "config": dump_config(config),
        }
        torch.save(state, folder / STATE)

    parameters = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    moments = sum(
        value.numel() * value.element_size()
        for part in trainer.optimizers.parts.values()
        for values in part.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    )
    folder = write_checkpoint(config.output, step, write, bytes_needed=parameters + moments + _SLACK)
    best = best_line(config.output)
    protected = (*config.checkpoint.keep_steps, *([best["step"]] if best else []))
    apply_retention(config.output, config.checkpoint.keep, protected)
    return folder
