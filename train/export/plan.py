"""Which tensor of the export comes from where: decided and checked as a whole before anything is written."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shared.errors import SetupError
from train.export.names import EMBEDDING_ENDING, LM_HEAD, part_of, spellings
from train.export.weights import FLOATS, TensorInfo, WeightFolder, cast_chunks, raw_chunks, read_weights, value_chunks

Origin = Literal["trained", "base vision", "base MTP"]


def origin_of(name: str) -> Origin:
    """Where a tensor of the export comes from: the checkpoint for the language model, else the base."""
    part = part_of(name)
    return "trained" if part == "language" else "base vision" if part == "vision" else "base MTP"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the export, under the base's name and in the base's dtype. `source` is what its bytes come from."""

    base: TensorInfo
    source: TensorInfo
    origin: Origin


@dataclass(frozen=True)
class ExportPlan:
    """The whole export: one entry for each tensor of the base. `warnings` are lines for the report."""

    base: WeightFolder
    checkpoint: WeightFolder
    tensors: Mapping[str, PlannedTensor]
    warnings: tuple[str, ...]

    def trained(self) -> list[PlannedTensor]:
        return [tensor for tensor in self.tensors.values() if tensor.origin == "trained"]


def make_plan(base_folder: Path, checkpoint_folder: Path) -> ExportPlan:
    """Match a checkpoint's tensors with the base's and check every one: name, shape, dtype, finite values.

    A language-model tensor may be spelled `model.…`, as the text class names it, or `model.language_model.…`, as the
    base does. Each must be there exactly once. Vision and MTP tensors of the checkpoint are left aside.
    Raises SetupError in one line for whatever does not fit. Reads the checkpoint's data once.
    """
    base, checkpoint = read_weights(base_folder), read_weights(checkpoint_folder)
    language = {name for name in base.tensors if origin_of(name) == "trained"}
    matched, warnings = _match_names(base, checkpoint, language)
    for name, source in matched.items():
        _check_tensor(base.tensors[name], source)
    narrower = [name for name, source in matched.items() if _bits(source.dtype) < _bits(base.tensors[name].dtype)]
    if narrower:
        warnings.append(
            f"{len(narrower)} tensors are narrower in the checkpoint than in the base (such as {narrower[0]}): what "
            "the training rounded away is not in the export"
        )
    tensors = {
        name: PlannedTensor(info, matched.get(name, info), origin_of(name)) for name, info in base.tensors.items()
    }
    return ExportPlan(base, checkpoint, tensors, tuple(warnings))


def _match_names(
    base: WeightFolder, checkpoint: WeightFolder, language: set[str]
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Base name -> checkpoint tensor, for every language-model tensor of the base, and warnings."""
    matched: dict[str, TensorInfo] = {}
    unknown: list[str] = []
    warnings: list[str] = []
    aside = 0
    for name, info in checkpoint.tensors.items():
        if origin_of(name) != "trained":
            aside += 1
            continue
        names = spellings(name) & language
        if not names:
            unknown.append(name)
        elif len(names) > 1 or (target := next(iter(names))) in matched:
            raise SetupError(
                f"{name} of {checkpoint.folder} means the same tensor as another spelling of it; export from a "
                "checkpoint that holds each tensor once"
            )
        else:
            matched[target] = info
    if unknown == [LM_HEAD]:
        _check_tied_head(checkpoint, matched)
        warnings.append(f"{LM_HEAD} of the checkpoint equals its embedding and is left out, as the base ties the two")
        unknown = []
    missing = sorted(language - set(matched))
    if missing or unknown:
        parts = [f"{len(missing)} missing ({_some(missing)})"] if missing else []
        parts += [f"{len(unknown)} unknown ({_some(unknown)})"] if unknown else []
        raise SetupError(
            f"the tensors of {checkpoint.folder} do not fit the base {base.folder}: {', '.join(parts)}; "
            "give the base that the run was started from, and a complete checkpoint"
        )
    if aside:
        warnings.append(f"{aside} vision and MTP tensors of the checkpoint are left aside: the base's own are exported")
    return matched, warnings


def _check_tied_head(checkpoint: WeightFolder, matched: Mapping[str, TensorInfo]) -> None:
    head = checkpoint.tensors[LM_HEAD]
    embedding = next((info for name, info in matched.items() if name.endswith(EMBEDDING_ENDING)), None)
    if (
        embedding is None
        or (embedding.dtype, embedding.nbytes) != (head.dtype, head.nbytes)
        or not _same_bytes(head, embedding)
    ):
        raise SetupError(
            f"{checkpoint.folder} has a {LM_HEAD} of its own, but the base ties it to the embedding and has no place "
            "for it; give the base that the run was started from"
        )


def _same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    return all(x == y for x, y in zip(raw_chunks(a), raw_chunks(b), strict=True))


def _check_tensor(base: TensorInfo, source: TensorInfo) -> None:
    where = f"{source.name} of {source.path}"
    if source.shape != base.shape:
        raise SetupError(
            f"{where} has shape {list(source.shape)}, the base's {list(base.shape)}; give the base of this run"
        )
    if source.dtype not in FLOATS or base.dtype not in FLOATS:
        raise SetupError(
            f"{where} is {source.dtype} and the base's is {base.dtype}; only {', '.join(FLOATS)} can be exported, "
            "so give the base and the checkpoint as they were before quantization"
        )
    for values in value_chunks(source):
        if not torch.isfinite(values).all():
            raise SetupError(f"{where} holds NaN or infinite values; export an earlier checkpoint")
    if _bits(base.dtype) < _bits(source.dtype):
        for values in cast_chunks(source, base.dtype):
            if not torch.isfinite(values).all():
                raise SetupError(
                    f"{where} holds values too large for the base's {base.dtype}; export an earlier checkpoint"
                )


def _bits(dtype: str) -> int:
    return FLOATS[dtype].itemsize * 8 if dtype in FLOATS else 0


def _some(names: Iterable[str], limit: int = 2) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (", …" if len(names) > limit else "")


def check_output_folder(out: Path, *sources: Path) -> None:
    """Raise SetupError unless `out` can be made: it is absent or empty, and not one of the folders it is made from."""
    resolved = out.resolve()
    for source in sources:
        if resolved == source.resolve() or source.resolve() in resolved.parents:
            raise SetupError(f"--out {out} is, or lies inside, {source}, which is read; choose another folder")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise SetupError(f"--out {out} is not a folder; choose another name")
    if out.exists() and any(os.scandir(out)):
        raise SetupError(f"--out {out} is not empty; remove it or choose another folder")
