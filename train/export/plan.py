"""Which tensor of the export comes from where: decided and checked as a whole before anything is written."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shared.errors import SetupError
from train.export.adapter import LowRank, is_adapter, merged_chunks, read_adapter
from train.export.names import EMBEDDING_ENDING, LM_HEAD, part_of, spellings
from train.export.weights import FLOATS, ITEM_BYTES, TensorInfo, WeightFolder, raw_chunks, read_weights, value_chunks

Origin = Literal["trained", "base language", "base vision", "base MTP"]
DtypeFrom = Literal["base", "checkpoint"]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the export, under the base's name and written as `dtype`. `source` is what its bytes come from.

    With `low_rank` the source is the base's own tensor, and this is added to it in float32.
    """

    base: TensorInfo
    source: TensorInfo
    origin: Origin
    dtype: str
    low_rank: LowRank | None = None

    @property
    def nbytes(self) -> int:
        """Its size in the export."""
        return self.base.nbytes if self.dtype == self.base.dtype else self.base.numel * ITEM_BYTES[self.dtype]

    @property
    def trained_dtype(self) -> str:
        """The dtype in which training left it: the checkpoint's, or the adapter's."""
        return self.source.dtype if self.low_rank is None else self.low_rank.a.dtype


@dataclass(frozen=True)
class ExportPlan:
    """The whole export: one entry for each tensor of the base. `warnings` are lines for the report."""

    base: WeightFolder
    checkpoint: Path
    tensors: Mapping[str, PlannedTensor]
    warnings: tuple[str, ...]
    dtype_from: DtypeFrom = "base"

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors of the export, headers aside."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def make_plan(base_folder: Path, checkpoint: Path, dtype_from: DtypeFrom = "base") -> ExportPlan:
    """Match a checkpoint's tensors with the base's and check every one: name, shape, dtype, finite values.

    A language-model tensor may be spelled `model.…`, as the text class names it, or `model.language_model.…`, as the
    base does. Of a whole model each must be there exactly once, and what it has of vision and MTP is left aside; of a
    LoRA adapter each must find its matrix in the base. `dtype_from` says whose dtype a trained tensor gets.
    Raises SetupError in one line for whatever does not fit. Reads the checkpoint's data once or twice.
    """
    base = read_weights(base_folder)
    language = {name for name in base.tensors if part_of(name) == "language"}
    adapter = is_adapter(checkpoint)
    planned, warnings = (_plan_adapter if adapter else _plan_whole)(base, checkpoint, language, dtype_from)
    for tensor in planned.values():
        _check_tensor(tensor)
    others: dict[str, Origin] = {"language": "base language", "vision": "base vision", "MTP": "base MTP"}
    tensors = {
        name: planned.get(name) or PlannedTensor(info, info, others[part_of(name)], info.dtype)
        for name, info in base.tensors.items()
    }
    return ExportPlan(base, checkpoint, tensors, tuple(warnings), dtype_from)


def final_values(tensor: PlannedTensor) -> Iterator[torch.Tensor]:
    """The values of a tensor of the export in flat pieces: its source's, or merged, rounded to `dtype`."""
    values = merged_chunks(tensor.base, tensor.low_rank) if tensor.low_rank else value_chunks(tensor.source)
    for chunk in values:
        yield chunk.to(FLOATS[tensor.dtype])


def _plan_whole(
    base: WeightFolder, folder: Path, language: set[str], dtype_from: DtypeFrom
) -> tuple[dict[str, PlannedTensor], list[str]]:
    """What a checkpoint with a whole language model gives, by the base's name, and warnings."""
    matched, warnings = _match_names(base, read_weights(folder), language)
    planned = {}
    for name, source in matched.items():
        original = base.tensors[name]
        planned[name] = PlannedTensor(
            original, source, "trained", original.dtype if dtype_from == "base" else source.dtype
        )
    narrower = [name for name, tensor in planned.items() if _bits(tensor.source.dtype) < _bits(tensor.base.dtype)]
    if narrower:
        warnings.append(
            f"{len(narrower)} tensors are narrower in the checkpoint than in the base (such as {narrower[0]}): what "
            "the training rounded away is not in the export"
        )
    if other := [name for name, tensor in planned.items() if tensor.dtype != tensor.base.dtype]:
        warnings.append(
            f"{len(other)} tensors are written in the checkpoint's dtype, which is not the base's (such as "
            f"{other[0]}: {planned[other[0]].dtype}, not {base.tensors[other[0]].dtype}); config.json stays the base's"
        )
    return planned, warnings


def _plan_adapter(
    base: WeightFolder, folder: Path, language: set[str], dtype_from: DtypeFrom
) -> tuple[dict[str, PlannedTensor], list[str]]:
    """What an adapter gives: the matrices that it changes, by the base's name."""
    if dtype_from == "checkpoint":
        raise SetupError(f"{folder} is a LoRA adapter, which has no whole tensors in a dtype; use --dtype-from base")
    planned: dict[str, PlannedTensor] = {}
    adapter = read_adapter(folder)
    for name, low_rank in adapter.items():
        names = spellings(name) & language
        if len(names) != 1:
            raise SetupError(
                f"the adapter {folder} changes {name}, which the language model of {base.folder} does not have; give "
                "the base that the adapter was trained on"
            )
        target = base.tensors[names.pop()]
        if target.name in planned:
            raise SetupError(f"the adapter {folder} changes {name} under two spellings; save the adapter again")
        if not low_rank.fits(target.shape):
            raise SetupError(
                f"the adapter {folder} changes {name} by B {list(low_rank.b.shape)} times A {list(low_rank.a.shape)}, "
                f"but the base's has shape {list(target.shape)}; give the base that the adapter was trained on"
            )
        planned[target.name] = PlannedTensor(target, target, "trained", target.dtype, low_rank)
    ranks = sorted({low_rank.rank for low_rank in adapter.values()})
    scalings = sorted({low_rank.scaling for low_rank in adapter.values()})
    return planned, [
        f"{len(planned)} matrices are the base's with a LoRA adapter merged in float32 (rank "
        f"{', '.join(map(str, ranks))}, scaling {', '.join(f'{scaling:.6g}' for scaling in scalings)}); the other "
        f"{len(language) - len(planned)} tensors of the language model are the base's own"
    ]


def _match_names(
    base: WeightFolder, checkpoint: WeightFolder, language: set[str]
) -> tuple[dict[str, TensorInfo], list[str]]:
    """Base name -> checkpoint tensor, for every language-model tensor of the base, and warnings."""
    matched: dict[str, TensorInfo] = {}
    unknown: list[str] = []
    warnings: list[str] = []
    aside = 0
    for name, info in checkpoint.tensors.items():
        if part_of(name) != "language":
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


def _check_tensor(planned: PlannedTensor) -> None:
    """Shape, dtypes, and no value that is not finite: neither in what was trained nor in what is to be written."""
    base, low_rank = planned.base, planned.low_rank
    given = [planned.source] if low_rank is None else [low_rank.a, low_rank.b]
    for tensor in given:
        where = f"{tensor.name} of {tensor.path}"
        if low_rank is None and tensor.shape != base.shape:
            raise SetupError(
                f"{where} has shape {list(tensor.shape)}, the base's {list(base.shape)}; give the base of this run"
            )
        if tensor.dtype not in FLOATS or base.dtype not in FLOATS:
            raise SetupError(
                f"{where} is {tensor.dtype} and the base's is {base.dtype}; only {', '.join(FLOATS)} can be exported, "
                "so give the base and the checkpoint as they were before quantization"
            )
        if not _finite(value_chunks(tensor)):
            raise SetupError(f"{where} holds NaN or infinite values; export an earlier checkpoint")
    rounds = low_rank is not None or _bits(planned.dtype) < _bits(planned.source.dtype)
    if rounds and not _finite(final_values(planned)):
        raise SetupError(
            f"{given[-1].name} of {given[-1].path} holds or gives values too large for the base's {planned.dtype}; "
            "export an earlier checkpoint"
        )


def _finite(chunks: Iterable[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(values).all()) for values in chunks)


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
