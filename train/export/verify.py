"""Read an export back from disk and hold every tensor against the base and the checkpoint."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import SetupError
from train.export.aux_files import GENERATION_CONFIG, STOP_TOKENS, read_json, stop_token_ids
from train.export.plan import ExportPlan, Origin, PlannedTensor
from train.export.weights import FLOATS, INDEX, TensorInfo, WeightFolder, largest_difference, raw_chunks, read_weights
from train.export.write import export_chunks


@dataclass(frozen=True)
class TensorRow:
    """One line of the provenance table. `source_dtype` is the checkpoint's (or the adapter's) for a trained tensor.

    `changed`: its bytes (in another dtype: its values) differ from the base's; `max_change`: the largest
    |export - base| of a value. Both are None before the export was read back.
    """

    name: str
    origin: Origin
    dtype: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    source_dtype: str
    base_dtype: str
    changed: bool | None = None
    max_change: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What reading the export back gave: the provenance table, and everything that is wrong (empty: a good export)."""

    rows: tuple[TensorRow, ...]
    problems: tuple[str, ...]


def provenance(plan: ExportPlan) -> tuple[TensorRow, ...]:
    """The table as planned, before anything was read back."""
    return tuple(
        TensorRow(
            name,
            tensor.origin,
            tensor.dtype,
            tensor.base.shape,
            tensor.base.numel,
            tensor.nbytes,
            tensor.trained_dtype,
            tensor.base.dtype,
        )
        for name, tensor in plan.tensors.items()
    )


def verify_export(
    plan: ExportPlan, aux_files: Mapping[str, bytes], folder: Path, progress: Callable[[int], None]
) -> Verdict:
    """Check the folder as a reader finds it: tensor names, shapes, dtypes, every byte, the index, the other files.

    Never raises for a bad export; what is wrong comes back as `problems`. `progress` is called with bytes read.
    """
    try:
        export = read_weights(folder)
    except SetupError as error:
        return Verdict(provenance(plan), (str(error),))
    problems = _layout_problems(plan, export)
    rows = []
    for row in provenance(plan):
        found = export.tensors.get(row.name)
        if found is not None and (found.dtype, found.shape) == (row.dtype, row.shape):
            row, problem = _compare(row, plan.tensors[row.name], found, progress)
            problems += [problem] if problem else []
        rows.append(row)
    problems += _aux_problems(aux_files, folder)
    return Verdict(tuple(rows), tuple(problems))


def _layout_problems(plan: ExportPlan, export: WeightFolder) -> list[str]:
    base = plan.base.tensors
    problems = [f"{name} is missing" for name in base if name not in export.tensors]
    problems += [f"{name} does not belong to the base" for name in export.tensors if name not in base]
    for name, found in export.tensors.items():
        wanted = base.get(name)
        if wanted is not None and (found.dtype, found.shape) != (plan.tensors[name].dtype, wanted.shape):
            problems.append(
                f"{name} is {found.dtype}{list(found.shape)}, not {plan.tensors[name].dtype}{list(wanted.shape)}"
            )
    if export.index is not None and json.loads(export.index)["metadata"]["total_size"] != export.tensor_bytes:
        problems.append(f"total_size in {INDEX} is not {export.tensor_bytes}")
    return problems


def _compare(
    row: TensorRow, planned: PlannedTensor, found: TensorInfo, progress: Callable[[int], None]
) -> tuple[TensorRow, str | None]:
    """Compare one exported tensor with its source (must be equal) and with the base (how far it moved)."""
    equal, changed, largest = True, False, 0.0
    pieces = zip(raw_chunks(found), export_chunks(planned), raw_chunks(planned.base), strict=True)
    for written, wanted, original in pieces:
        equal = equal and written == wanted
        if row.dtype != row.base_dtype or written != original:
            apart = 0.0
            if row.dtype in FLOATS:
                apart = largest_difference(written, row.dtype, original, row.base_dtype)
            changed = changed or row.dtype == row.base_dtype or apart > 0
            largest = max(largest, apart)
        progress(len(written))
    measured = replace(row, changed=changed, max_change=largest)
    return measured, None if equal else f"{row.name} does not hold the bytes of its source ({planned.source.path})"


def _aux_problems(aux_files: Mapping[str, bytes], folder: Path) -> list[str]:
    problems = []
    for name, content in aux_files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            problems.append(f"{name} is missing or is not what was to be written")
    try:
        stops, wanted = read_json(folder / GENERATION_CONFIG).get("eos_token_id"), stop_token_ids(folder)
    except SetupError as error:
        return [*problems, str(error)]
    if stops != wanted:
        problems.append(f"{GENERATION_CONFIG} stops on {stops}, not on {wanted} ({' and '.join(STOP_TOKENS)})")
    return problems
