"""Safetensors folders, read by header and in pieces: no tensor is ever in memory as a whole.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header that gives
each tensor's dtype, shape and byte range, then the data without holes. A folder holds one such file or several
shards, named by `model.safetensors.index.json`.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shared.errors import SetupError

INDEX = "model.safetensors.index.json"
CHUNK_VALUES = 8 << 20
MAX_HEADER_BYTES = 100 << 20
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `nbytes` bytes of `path` from byte `offset`. `dtype` is the format's word for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file: its header's bytes (length prefix included) and its tensors in the order of their data.

    `metadata` is what the header says about the file itself, None when it says nothing.
    """

    path: Path
    header: bytes
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str] | None

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class WeightFolder:
    """All weight files of a model folder. `index` is the bytes of the shard index, None for a single file."""

    folder: Path
    files: tuple[WeightFile, ...]
    index: bytes | None
    tensors: Mapping[str, TensorInfo]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, headers aside: what an index calls total_size."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_weights(folder: Path) -> WeightFolder:
    """The headers of every weight file in `folder`.

    Raises SetupError when there is none, when the shards and the index disagree, or when a file is not whole.
    """
    index_path = folder / INDEX
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if index_path.is_file():
        index = index_path.read_bytes()
        weight_map = _weight_map(index_path, index)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if name not in present]
        if missing:
            raise SetupError(f"{index_path} names {missing[0]}, which is not in the folder; copy or download it again")
        if extra := sorted(set(present) - set(names)):
            raise SetupError(f"{folder / extra[0]} is not named in {INDEX}; remove the one that does not belong here")
    elif present == ["model.safetensors"]:
        index, weight_map, names = None, None, present
    elif present:
        raise SetupError(f"{folder} holds {len(present)} weight files but no {INDEX}; copy or download it again")
    else:
        raise SetupError(f"{folder} holds no *.safetensors file; give a folder that holds a model's weights")

    files = tuple(read_header(folder / name) for name in names)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in tensors:
                raise SetupError(f"{folder} holds {tensor.name} twice; copy or download it again")
            tensors[tensor.name] = tensor
    if weight_map is not None and {name: info.path.name for name, info in tensors.items()} != weight_map:
        raise SetupError(f"{index_path} does not say what the shards hold; copy or download the folder again")
    return WeightFolder(folder, files, index, tensors)


def _weight_map(path: Path, data: bytes) -> dict[str, str]:
    try:
        weight_map = json.loads(data)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SetupError(f"{path} is not an index of weight files; copy or download it again") from None


def read_header(path: Path) -> WeightFile:
    """One file's header, checked against the file's size. Raises SetupError for anything that is not a whole file."""
    broken = SetupError(f"{path} is not a whole safetensors file (cut or damaged); copy or download it again")
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise broken
        header = prefix + file.read(length)
    try:
        entries = json.loads(header[8:])
        metadata = entries.pop("__metadata__", None)
        tensors = [_tensor_info(name, entry, path, len(header)) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise broken from None
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = len(header)
    for tensor in tensors:
        item = ITEM_BYTES.get(tensor.dtype)
        if tensor.offset != end or (item is not None and tensor.numel * item != tensor.nbytes):
            raise broken
        end += tensor.nbytes
    if end != size:
        raise broken
    return WeightFile(path, header, tuple(tensors), metadata)


def header_bytes(
    tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """A file's header, length prefix included, for (name, dtype, shape, bytes) in the order of the data to follow.

    Padded with blanks to whole groups of eight bytes, as the format's own library does. The caller sees to it that
    every tensor begins at a multiple of its values' size: wider dtypes first.
    """
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _tensor_info(name: str, entry: Mapping[str, Any], path: Path, data_start: int) -> TensorInfo:
    begin, end = map(int, entry["data_offsets"])
    shape = tuple(map(int, entry["shape"]))
    if not 0 <= begin <= end:
        raise ValueError("byte range")
    return TensorInfo(name, str(entry["dtype"]), shape, path, data_start + begin, end - begin)


def raw_chunks(tensor: TensorInfo) -> Iterator[bytearray]:
    """The tensor's bytes, in pieces of CHUNK_VALUES values: pieces of two dtypes of one shape lie side by side."""
    piece = CHUNK_VALUES * max(1, tensor.nbytes // max(1, tensor.numel))
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        left = tensor.nbytes
        while left:
            chunk = bytearray(min(piece, left))
            if file.readinto(chunk) != len(chunk):
                raise OSError(f"{tensor.path} became shorter while it was read")
            left -= len(chunk)
            yield chunk


def value_chunks(tensor: TensorInfo) -> Iterator[torch.Tensor]:
    """The tensor's values as flat pieces in its own dtype, which must be one of FLOATS."""
    for chunk in raw_chunks(tensor):
        yield torch.frombuffer(chunk, dtype=FLOATS[tensor.dtype])


def value_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous tensor, without a copy."""
    data: memoryview = values.view(torch.uint8).numpy().data
    return data


def largest_difference(a: bytearray, a_dtype: str, b: bytearray, b_dtype: str) -> float:
    """max |a - b| over two pieces of equally many values; the dtypes are of FLOATS."""
    x, y = (torch.frombuffer(data, dtype=FLOATS[dtype]).double() for data, dtype in ((a, a_dtype), (b, b_dtype)))
    return float((x - y).abs().max())
