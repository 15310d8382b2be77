"""The trainer's weights into a rollout engine that holds its own copy, and the proof that they arrived.

The proof has four parts. Every live tensor has a name that the engine knows, and every tensor of the engine's language
model is covered by live ones (`plan_pieces`); all numbers are finite; after loading, each tensor is read back from the
engine, as its kernels have it, and has the checksum of the trainer's in the engine's dtype (`prove`); and every episode
carries the fingerprint of the weights it was sampled from, which train/rollout.py compares with the trainer's.

The HF engine shares the trainer's model object: there the fingerprint is all that is needed.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from shared.engines.vllm_weights import checksum, kernel_tensors
from shared.engines.weight_names import (
    Piece,
    checkpoint_names,
    differing,
    is_conditional,
    plan_pieces,
    refuse_not_finite,
)
from train.live import live_tensors

__all__ = [
    "Piece",
    "WeightHolder",
    "WeightSync",
    "check_finite",
    "checkpoint_names",
    "checksum",
    "differing",
    "fingerprint",
    "is_conditional",
    "plan_pieces",
    "refuse_not_finite",
]

Value = TypeVar("Value")


class WeightHolder(Protocol):
    """An engine whose weights can be replaced and looked at; `VLLMEngine` is one."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the live weights by these, given under checkpoint names, and forget what the old ones computed."""

    def inspect(self, function: Callable[[nn.Module], Value]) -> Value:
        """What `function` says about the engine's model."""


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """16 hex digits that change when any parameter's bits do, up to rearrangements within one tensor.

    Per tensor: the sum of its 16- or 32-bit words as integers, which no order of addition can change.
    """
    digest = hashlib.sha256()
    for name, live in sorted(live_tensors(model).items()):
        data = live.value().contiguous()
        words = data.view(torch.int16 if data.element_size() == 2 else torch.int32)
        digest.update(f"{name}:{int(words.sum(dtype=torch.int64))};".encode())
    return digest.hexdigest()[:16]


class WeightSync:
    """Brings an engine to a live model's weights, again and again. All of `push` or an error: never a half."""

    def __init__(self, model: nn.Module, engine: WeightHolder) -> None:
        """SetupError when live model and engine are not the same model (see `plan_pieces`)."""
        self.model = model
        self.engine = engine
        shapes = engine.inspect(lambda loaded: {name: tuple(t.shape) for name, t in kernel_tensors(loaded)})
        live = {name: tensor.shape for name, tensor in live_tensors(model).items()}
        self.names = checkpoint_names(live, is_conditional(shapes))
        self.pieces = plan_pieces(shapes, live)

    def push(self) -> None:
        """Load the live weights into the engine, and prove it.

        SetupError before anything is loaded when a number is not finite; RuntimeError when the engine does not hold
        what it was given.
        """
        check_finite(self.model)
        self.engine.load_weights((self.names[name], live.value()) for name, live in live_tensors(self.model).items())
        self.prove()

    def prove(self) -> None:
        """RuntimeError naming the first tensor whose checksum in the engine is not the trainer's."""
        wrong = self.engine.inspect(lambda loaded: list(differing(dict(kernel_tensors(loaded)), self._live())))
        if wrong:
            raise RuntimeError(
                f"weight sync: {wrong[0].live} is not what the engine's {wrong[0].engine} holds after loading "
                f"({len(wrong)} of {len(self.pieces)} pieces differ); no rollout was made with these weights"
            )

    def _live(self) -> Iterator[tuple[Piece, Tensor]]:
        live = live_tensors(self.model)
        return ((piece, live[piece.live].value()) for piece in self.pieces)


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """SetupError naming the first tensor with a NaN or an infinity, and how many there are of them."""
    for name, live in live_tensors(model).items():
        refuse_not_finite(name, live.value())
