"""A checkpoint's language model into an engine that was built from another folder, and against another folder.

This is what training does at each sync (train/weight_sync.py), from files instead of from a live model: same names,
same proof. Vision and MTP tensors of a checkpoint are left aside: nothing trains them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shared.engines.hf import HFEngine
from shared.engines.vllm import VLLMEngine
from shared.engines.vllm_weights import kernel_tensors
from shared.engines.weight_files import tensor_shapes
from shared.engines.weight_names import (
    Piece,
    Shape,
    checkpoint_names,
    differing,
    is_conditional,
    plan_pieces,
    refuse_not_finite,
)
from shared.errors import SetupError

_LANGUAGE = "model.language_model."
_NOT_LANGUAGE = ("model.visual.", "visual.", "mtp.", "model.mtp.")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class WeightsCheck:
    """Language tensors of two folders: how many were compared, and the names of those that are not the same."""

    compared: int
    different: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether each tensor is in both folders, with the same numbers."""
        return not self.different and not self.missing


class LanguageTensors(Mapping[str, Tensor]):
    """The language model's tensors in a folder's safetensors files, by the text class's names, read one at a time."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers only. SetupError when there are none, or a file is damaged."""
        self.folder = folder
        self.shapes: dict[str, Shape] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        paths = sorted(folder.glob("*.safetensors"))
        if (folder / "adapter_config.json").is_file():
            raise SetupError(f"{folder} holds an adapter, not a model: merge it first (scripts/export_merged.py)")
        if not paths:
            raise SetupError(f"{folder} has no weights (*.safetensors): give the folder of a checkpoint or an export")
        for path in paths:
            for name, shape in tensor_shapes(path).items():
                if not name.startswith(_NOT_LANGUAGE):
                    text = "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name
                    self._places[text] = path, name
                    self.shapes[text] = shape

    def __getitem__(self, name: str) -> Tensor:
        path, written = self._places[name]
        with safe_open(path, "pt") as file:
            tensor: Tensor = file.get_tensor(written)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def sync_vllm(engine: VLLMEngine, checkpoint: Path) -> None:
    """Load the checkpoint into the engine under the names that it knows, and prove by checksum that it is there.

    SetupError when a number is not finite, or when checkpoint and engine are not the same model; RuntimeError when the
    engine does not hold what it was given.
    """
    tensors = LanguageTensors(checkpoint)
    for name, tensor in tensors.items():
        refuse_not_finite(name, tensor)
    shapes = engine.inspect(lambda loaded: {name: tuple(t.shape) for name, t in kernel_tensors(loaded)})
    names = checkpoint_names(tensors, is_conditional(shapes))
    pieces = plan_pieces(shapes, tensors.shapes)
    engine.load_weights((names[name], tensor) for name, tensor in tensors.items())
    expected: Iterator[tuple[Piece, Tensor]] = ((piece, tensors[piece.live]) for piece in pieces)
    if wrong := engine.inspect(lambda loaded: list(differing(dict(kernel_tensors(loaded)), expected))):
        raise RuntimeError(
            f"{wrong[0].live} of {checkpoint} is not what the engine's {wrong[0].engine} holds after loading "
            f"({len(wrong)} of {len(pieces)} pieces differ)"
        )


@torch.no_grad()
def sync_hf(engine: HFEngine, checkpoint: Path) -> None:
    """Overwrite every parameter of the engine's model with the checkpoint's, in the dtype that it has there.

    SetupError unless each parameter is in the checkpoint, and each of its tensors is a parameter of that shape.
    """
    tensors = LanguageTensors(checkpoint)
    parameters = {
        "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name: parameter
        for name, parameter in engine.model.named_parameters()
        if not name.startswith(_NOT_LANGUAGE)
    }
    spare = {_HEAD} if _HEAD not in parameters else set()  # a tied head, written out
    if unmatched := sorted(parameters.keys() ^ (tensors.keys() - spare)):
        raise SetupError(
            f"{checkpoint} and the model that was loaded do not hold the same tensors "
            f"({len(unmatched)} are in one of them only, {unmatched[0]} for one): give the base it was trained from"
        )
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise SetupError(
                f"{name} of {checkpoint} has shape {tuple(tensor.shape)}, in the model {tuple(parameter.shape)}"
            )
        refuse_not_finite(name, tensor)
        parameter.copy_(tensor)
    engine.reset()


def refuse_other_shapes(checkpoint: Path, base: Path) -> None:
    """SetupError unless both language models have the same tensors in the same shapes; only headers are read."""
    ours, theirs = LanguageTensors(checkpoint), LanguageTensors(base)
    if unmatched := sorted((ours.keys() ^ theirs.keys()) - {_HEAD}):
        where = checkpoint if unmatched[0] in ours else base
        raise SetupError(
            f"{checkpoint} and {base} are different models ({unmatched[0]} is in {where} only, one of "
            f"{len(unmatched)} such tensors): give the base it was trained from"
        )
    for name in sorted(ours.keys() & theirs.keys()):
        if (shape := ours.shapes[name]) != (other := theirs.shapes[name]):
            raise SetupError(
                f"{name} has shape {shape} in {checkpoint} and {other} in {base}: give the base it was trained from"
            )


def compare_language_weights(checkpoint: Path, export: Path) -> WeightsCheck:
    """Whether the export's language model is the checkpoint's, bit for bit after the export's dtype.

    SetupError when the checkpoint holds a number that is not finite.
    """
    ours, theirs = LanguageTensors(checkpoint), LanguageTensors(export)
    names = set(ours) | set(theirs)
    if _HEAD in names and not {_HEAD} <= (ours.keys() & theirs.keys()):
        names -= {_HEAD} if _tied(ours) and _tied(theirs) else set()
    missing = tuple(sorted(name for name in names if name not in ours or name not in theirs))
    different = []
    for name in sorted(names - set(missing)):
        trained, exported = ours[name], theirs[name]
        refuse_not_finite(name, trained)
        if not torch.equal(trained.to(exported.dtype), exported):
            different.append(name)
    return WeightsCheck(len(names) - len(missing), tuple(different), missing)


def _tied(tensors: LanguageTensors) -> bool:
    """Whether the folder's output head is its embedding: not written, or written twice."""
    return _HEAD not in tensors or torch.equal(tensors[_HEAD], tensors[_EMBEDDING])
