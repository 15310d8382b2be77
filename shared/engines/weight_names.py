"""Which tensor of a loaded vLLM model holds which tensor of the language model, and whether it does.

Weights come to an engine under the names of a checkpoint; vLLM fuses some of them and pads others. What is here names
each place, and compares what lies there, by checksum (shared/engines/vllm_weights.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from shared.engines.vllm_weights import checksum
from shared.errors import SetupError

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


def differing(engine: Mapping[str, Tensor], expected: Iterable[tuple[Piece, Tensor]]) -> Iterator[Piece]:
    """The pieces whose rows in the engine are not the live tensor in the engine's dtype, by checksum."""
    for piece, live in expected:
        held = engine[piece.engine]
        if checksum(held.narrow(0, piece.first, piece.rows)) != checksum(live.to(held.dtype)):
            yield piece


def refuse_not_finite(name: str, tensor: Tensor) -> None:
    """SetupError when the tensor has a NaN or an infinity."""
    if not (finite := tensor.isfinite()).all():
        raise SetupError(
            f"weight sync: {name} holds {int((~finite).sum())} numbers that are not finite; "
            "the engine keeps its weights. Go back to a checkpoint before, and lower the learning rate"
        )
