"""The trainer's weights into a rollout engine that holds its own copy, and the proof that they arrived.

The proof has four parts. Every live tensor has a name that the engine knows, and every tensor of the engine's language
model is covered by live ones (`plan_pieces`); all numbers are finite; after loading, each tensor is read back from the
engine, as its kernels have it, and has the checksum of the trainer's in the engine's dtype (`prove`); and every episode
carries the fingerprint of the weights it was sampled from, which train/rollout.py compares with the trainer's.

The HF engine shares the trainer's model object: there the fingerprint is all that is needed.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from shared.engines.vllm_weights import checksum, kernel_tensors
from shared.errors import SetupError
from train.live import live_tensors

Value = TypeVar("Value")
Shape = tuple[int, ...]

# Modules that vLLM fuses, and which live ones their rows come from, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_LANGUAGE = "language_model."
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Their rows are padded in the engine: no token has the ids beyond the vocabulary.
_PADDED = {_EMBEDDING, _HEAD}


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


def checkpoint_names(live: Iterable[str], conditional: bool) -> dict[str, str]:
    """From the names of the live text model to those that the engine loads.

    An engine built from a conditional-generation folder (a Qwen3.5 base) knows `model.language_model.…` where the text
    model has `model.…`. SetupError for a name of neither kind: vLLM would take some such names and load nothing.
    """
    names: dict[str, str] = {}
    for name in live:
        inner = name.removeprefix("model.")
        if name != _HEAD and (name == inner or inner.startswith((_LANGUAGE, "visual."))):
            raise SetupError(
                f"weight sync: {name} is no tensor of a text model, the rollout engine has no place for it; "
                "train the language model itself, without wrappers or extra heads"
            )
        names[name] = f"model.{_LANGUAGE}{inner}" if conditional and name != _HEAD else name
    return names


@dataclass(frozen=True)
class Piece:
    """Rows `first` to `first + rows` of the engine's tensor `engine` hold the live tensor `live`."""

    engine: str
    live: str
    first: int
    rows: int


def is_conditional(engine: Iterable[str]) -> bool:
    """Whether these names in vLLM are those of a conditional-generation model, with the language model as a part."""
    return any(name.startswith(_LANGUAGE) for name in engine)


def plan_pieces(engine: Mapping[str, Shape], live: Mapping[str, Shape]) -> tuple[Piece, ...]:
    """Which rows of which engine tensor must hold which live tensor.

    Args:
        engine: shapes by name in vLLM; what belongs to the vision tower of a conditional model is left out of account.
        live: shapes by name of the trained text model; a tied head is not among them.

    SetupError naming the tensor when one of the engine's language model has no live counterpart, one of the live
    ones is nowhere in the engine, or the shapes do not agree.
    """
    conditional = is_conditional(engine)
    pieces: list[Piece] = []
    for name, shape in engine.items():
        if conditional and not name.startswith(_LANGUAGE):
            continue
        inner = name.removeprefix(_LANGUAGE)
        first = 0
        for part in _live_names(inner, live):
            if part not in live:
                raise SetupError(
                    f"weight sync: the engine's {name} needs {part}, which the trained model lacks: "
                    "model.path and the engine's folder hold different models"
                )
            rows = live[part][0] if live[part] else 1
            pieces.append(Piece(name, part, first, rows))
            if _row_size(shape) != _row_size(live[part]):
                raise SetupError(f"weight sync: {part} has shape {live[part]}, the engine's {name} has {shape}")
            first += rows
        if not (first == shape[0] or (inner in _PADDED and first < shape[0])):
            raise SetupError(f"weight sync: {name} has {shape[0]} rows in the engine, the trained model {first}")
    if missing := sorted(live.keys() - {piece.live for piece in pieces}):
        raise SetupError(f"weight sync: the engine has no place for {missing[0]} ({len(missing)} such tensors)")
    return tuple(pieces)


def _live_names(inner: str, live: Mapping[str, Shape]) -> tuple[str, ...]:
    """The live tensors whose rows make up the engine's tensor `inner`."""
    if inner == _HEAD and _HEAD not in live:
        return (_EMBEDDING,)
    path, _, kind = inner.rpartition(".")
    parent, _, module = path.rpartition(".")
    return tuple(f"{parent}.{part}.{kind}" for part in FUSED[module]) if module in FUSED else (inner,)


def _row_size(shape: Shape) -> int:
    size = 1
    for length in shape[1:]:
        size *= length
    return size


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


def differing(engine: Mapping[str, Tensor], expected: Iterable[tuple[Piece, Tensor]]) -> Iterator[Piece]:
    """The pieces whose rows in the engine are not the live tensor in the engine's dtype, by checksum."""
    for piece, live in expected:
        held = engine[piece.engine]
        if checksum(held.narrow(0, piece.first, piece.rows)) != checksum(live.to(held.dtype)):
            yield piece


@torch.no_grad()
def check_finite(model: nn.Module) -> None:
    """SetupError naming the first tensor with a NaN or an infinity, and how many there are of them."""
    for name, live in live_tensors(model).items():
        refuse_not_finite(name, live.value())


def refuse_not_finite(name: str, tensor: Tensor) -> None:
    """SetupError when the tensor has a NaN or an infinity."""
    if not (finite := tensor.isfinite()).all():
        raise SetupError(
            f"weight sync: {name} holds {int((~finite).sum())} numbers that are not finite; "
            "the engine keeps its weights. Go back to a checkpoint before, and lower the learning rate"
        )
