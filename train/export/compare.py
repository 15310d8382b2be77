"""Two model folders side by side, tensor by tensor and in pieces: neither is ever in memory as a whole."""

import filecmp
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from shared.errors import SetupError
from train.export.names import Kind, kind_of, text_name
from train.export.weights import FLOATS, INDEX, TensorInfo, WeightFolder, raw_chunks, read_weights

# `rounded`: of two float dtypes, where the wider one's values cast to the narrower dtype are the other's bytes.
Status = Literal["equal", "rounded", "different", "other shape", "only in A", "only in B"]
FileStatus = Literal["equal", "different", "only in A", "only in B"]


@dataclass(frozen=True)
class TensorPair:
    """One tensor in both folders, named as the text class spells it; None stands for a side that lacks it.

    `equal` means the same dtype, shape and bytes. `max_change` is max |a - b|, `squares` are the sums of (a - b)^2 and
    of a^2; None where the two can't be subtracted: another shape, values that are no floats, or NaN and infinities.
    """

    name: str
    kind: Kind
    status: Status
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    max_change: float | None = None
    squares: tuple[float, float] | None = None

    @property
    def relative_l2(self) -> float | None:
        """||a - b|| / ||a||; None where it can't be said, as when a is all zeros and b is not."""
        return None if self.squares is None else relative(*self.squares)


def relative(difference: float, size: float) -> float | None:
    """sqrt(difference / size) for two sums of squares; 0 for no difference, None for one against nothing."""
    if difference == 0:
        return 0.0
    return math.sqrt(difference / size) if size > 0 else None


@dataclass(frozen=True)
class Comparison:
    """All tensors of two folders, and their other files by name."""

    tensors: tuple[TensorPair, ...]
    files: Mapping[str, FileStatus]

    def same_weights(self) -> bool:
        return all(pair.status == "equal" for pair in self.tensors)

    def same_files(self) -> bool:
        return all(status == "equal" for status in self.files.values())


def compare_folders(a: Path, b: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Comparison:
    """Compare every tensor and every other file of two folders; how the tensors lie in shards makes no difference.

    `progress` is called with bytes of A that are done, and all that there are. Raises SetupError when a folder has no
    whole weight files, or holds a tensor under both of its spellings.
    """
    ours, theirs = _by_text_name(read_weights(a)), _by_text_name(read_weights(b))
    total = sum(tensor.nbytes for tensor in ours.values())
    pairs, done = [], 0
    for name in sorted(ours.keys() | theirs.keys()):
        pairs.append(_compare(name, ours.get(name), theirs.get(name)))
        done += ours[name].nbytes if name in ours else 0
        progress(done, total)
    return Comparison(tuple(pairs), _compare_files(a, b))


def _by_text_name(weights: WeightFolder) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, tensor in weights.tensors.items():
        if (other := found.get(text_name(name))) is not None:
            raise SetupError(f"{name} of {weights.folder} is the same tensor as its {other.name}; remove one of them")
        found[text_name(name)] = tensor
    return found


def _compare(name: str, a: TensorInfo | None, b: TensorInfo | None) -> TensorPair:
    shapes = (a.shape if a else None, b.shape if b else None)
    dtypes = (a.dtype if a else None, b.dtype if b else None)

    def pair(status: Status, largest: float | None = None, squares: tuple[float, float] | None = None) -> TensorPair:
        return TensorPair(name, kind_of(name), status, shapes, dtypes, largest, squares)

    if a is None or b is None:
        return pair("only in B" if a is None else "only in A")
    if a.shape != b.shape:
        return pair("other shape")
    if a.dtype not in FLOATS or b.dtype not in FLOATS:
        same = a.dtype == b.dtype and all(x == y for x, y in zip(raw_chunks(a), raw_chunks(b), strict=True))
        return pair("equal" if same else "different")
    same = rounded = True
    largest = difference = size = 0.0
    for x, y in _value_pieces(a, b):
        x64, y64 = x.double(), y.double()
        size += float(x64.square().sum())
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        same = False
        rounded = rounded and a.dtype != b.dtype and _rounds(x, y)
        apart = x64.sub_(y64).abs_()
        largest = max(largest, float(apart.max())) if not apart.isnan().any() else math.nan
        difference += float(apart.square_().sum())
    status: Status = "equal" if same else "rounded" if rounded else "different"
    finite = all(map(math.isfinite, (largest, difference, size)))
    return pair(status, largest, (difference, size)) if finite else pair(status)


def _value_pieces(a: TensorInfo, b: TensorInfo) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for x, y in zip(raw_chunks(a), raw_chunks(b), strict=True):
        yield torch.frombuffer(x, dtype=FLOATS[a.dtype]), torch.frombuffer(y, dtype=FLOATS[b.dtype])


def _rounds(x: torch.Tensor, y: torch.Tensor) -> bool:
    narrow, wide = (x, y) if x.dtype.itemsize < y.dtype.itemsize else (y, x)
    return torch.equal(wide.to(narrow.dtype).view(torch.uint8), narrow.view(torch.uint8))


def _compare_files(a: Path, b: Path) -> dict[str, FileStatus]:
    """Whatever is not weights, by its bytes; folders and hidden files are left aside."""
    ours, theirs = _other_files(a), _other_files(b)
    statuses: dict[str, FileStatus] = {}
    for name in sorted(ours | theirs):
        if name not in theirs:
            statuses[name] = "only in A"
        elif name not in ours:
            statuses[name] = "only in B"
        else:
            statuses[name] = "equal" if filecmp.cmp(a / name, b / name, shallow=False) else "different"
    return statuses


def _other_files(folder: Path) -> set[str]:
    names = {path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")}
    return {name for name in names if name != INDEX and not name.endswith(".safetensors")}
