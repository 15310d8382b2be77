"""Write an export beside its place and rename it: a folder under the wanted name is always a whole one."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shared.errors import SetupError
from shared.files import flush, write_atomic
from train.export.plan import ExportPlan, PlannedTensor, final_values
from train.export.weights import INDEX, ITEM_BYTES, WeightFile, header_bytes, raw_chunks, value_bytes

SPARE_BYTES = 64 << 20


@contextmanager
def beside(out: Path, needed_bytes: int) -> Iterator[Path]:
    """A fresh folder `.NAME.partial` next to `out`, renamed to `out` when the block ends without an exception.

    What an interrupted export left under that name is removed first, and an exception removes it as well. Raises
    SetupError when another export is at work there, or when the disk has less than `needed_bytes` free.
    """
    partial = out.parent / f".{out.name}.partial"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"--out {out} can't be made ({error.strerror}); choose a folder that you may write to"
        ) from None
    lock = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"another export is writing {out}; wait for it or choose another folder") from None
        for leftover in partial.iterdir():
            leftover.unlink()
        try:
            free = shutil.disk_usage(partial).free
            if free < needed_bytes + SPARE_BYTES:
                raise SetupError(
                    f"--out {out} needs {needed_bytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; "
                    "free some or choose another disk"
                )
            yield partial
            flush(partial)
            os.rename(partial, out)  # replaces an empty folder, never one with content
            flush(out.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def write_export(
    plan: ExportPlan, aux_files: Mapping[str, bytes], folder: Path, progress: Callable[[int], None]
) -> None:
    """Fill `folder`: the base's weight files in their own layout with the trained tensors put in, and the other files.

    Header, order and byte ranges are the base's, so a checkpoint equal to the base gives files equal to the base's;
    only a file in which a tensor changes its dtype is laid out anew. `progress` is called with bytes written.
    """
    for file in plan.base.files:
        with open(folder / file.path.name, "wb") as output:
            header, tensors = file_layout(plan, file)
            output.write(header)
            for tensor in tensors:
                for data in export_chunks(tensor):
                    output.write(data)
                    progress(len(data))
            output.flush()
            os.fsync(output.fileno())
    if plan.base.index is not None:
        write_atomic(folder / INDEX, index_bytes(plan))
    for name, content in aux_files.items():
        write_atomic(folder / name, content)


def file_layout(plan: ExportPlan, file: WeightFile) -> tuple[bytes, list[PlannedTensor]]:
    """The header of the export's file in place of the base's `file`, and its tensors in the order of their data."""
    tensors = [plan.tensors[tensor.name] for tensor in file.tensors]
    if all(tensor.dtype == tensor.base.dtype for tensor in tensors):
        return file.header, tensors
    # Wider values first, so that each tensor begins at a multiple of its values' size.
    tensors.sort(key=lambda tensor: -ITEM_BYTES.get(tensor.dtype, 0))
    return header_bytes([(t.base.name, t.dtype, t.base.shape, t.nbytes) for t in tensors], file.metadata), tensors


def export_chunks(tensor: PlannedTensor) -> Iterator[bytes | bytearray | memoryview]:
    """The bytes of one tensor of the export, in pieces: the source's own, or cast or merged where that is planned."""
    if tensor.low_rank is None and tensor.source.dtype == tensor.dtype:
        yield from raw_chunks(tensor.source)
    else:
        yield from map(value_bytes, final_values(tensor))


def index_bytes(plan: ExportPlan) -> bytes:
    """The shard index: the base's bytes, but for a total_size that is another one here, or wrong in the base."""
    assert plan.base.index is not None
    index = json.loads(plan.base.index)
    metadata = index.setdefault("metadata", {})
    if metadata.get("total_size") == plan.tensor_bytes:
        return plan.base.index
    metadata["total_size"] = plan.tensor_bytes
    return (json.dumps(index, indent=2) + "\n").encode()


def json_bytes(value: object) -> bytes:
    """A report as it is written: JSON with a line break at its end. ValueError for NaN and infinities."""
    return (json.dumps(value, indent=1, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: object) -> None:
    """Write a JSON file that has reached the disk when this returns."""
    write_atomic(path, json_bytes(value))
