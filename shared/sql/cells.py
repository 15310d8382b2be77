"""How result cells cross from a worker process to this one.

The parent never unpickles what a worker sent: a worker runs SQLite's C code on SQL from a model, so
its output is data, not objects. JSON carries int, float (infinities included), str and None as they
are; a BLOB is `{"b": hex}`, and TEXT that is not UTF-8 is `{"t": hex}`. A cell is never a JSON object
otherwise, so the two can't be confused with text.
"""

import json
from typing import Any


class BadText(str):
    """A TEXT cell whose bytes are not UTF-8.

    As a string it reads with replacement characters, so it can be shown, encoded and tokenized. It
    compares by its raw bytes: equal to the same bad text, never to an ordinary string or to a BLOB.
    """

    raw: bytes

    def __new__(cls, raw: bytes) -> "BadText":
        self = super().__new__(cls, raw.decode("utf-8", "replace"))
        self.raw = raw
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BadText) and self.raw == other.raw

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((BadText, self.raw))

    def __getnewargs__(self) -> tuple[bytes]:  # type: ignore[override]
        return (self.raw,)

    def __repr__(self) -> str:
        return f"BadText({self.raw!r})"


class RawText:
    """In a worker: TEXT that did not decode, on its way to becoming a `BadText` in the parent."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


def decode_text(raw: bytes) -> str | RawText:
    """A worker's `text_factory` for databases that hold TEXT which is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return RawText(raw)


def _encode_cell(cell: object) -> dict[str, str]:
    if isinstance(cell, bytes):
        return {"b": cell.hex()}
    if isinstance(cell, RawText):
        return {"t": cell.raw.hex()}
    raise TypeError(f"a {type(cell).__name__} is not a SQLite cell")


def _decode_cell(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        if "b" in value:
            return bytes.fromhex(value["b"])
        if "t" in value:
            return BadText(bytes.fromhex(value["t"]))
    return value


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_encode_cell, check_circular=False)
_decoder = json.JSONDecoder(object_hook=_decode_cell)


def encode(value: object) -> bytes:
    """UTF-8 JSON of rows or of a message; lone surrogates (which SQLite never returns) are escaped."""
    text = _encoder.encode(value)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"), default=_encode_cell).encode("ascii")


def decode(data: bytes | memoryview) -> Any:
    """The inverse of `encode`. ValueError or RecursionError when the bytes are not such JSON."""
    return _decoder.decode(str(data, "utf-8"))
