"""Text that models and databases wrote, made safe for where it is shown."""

import unicodedata
from pathlib import Path

_KEPT = "\n\t"
_MARKS = "\\`*_[]|<>#"


def plain(text: str) -> str:
    """The text without anything that a terminal obeys or that reorders what is around it; each is named instead.

    >>> plain("a\\x1b[31m\\u202eb")
    'a␛[31m<U+202E>b'
    """
    return "".join(map(_plain_character, text.encode("utf-8", "replace").decode()))


def _plain_character(c: str) -> str:
    if c in _KEPT or unicodedata.category(c) not in ("Cc", "Cf", "Zl", "Zp", "Cn", "Co"):
        return c
    code = ord(c)
    return chr(0x2400 + code) if code < 0x20 else f"<U+{code:04X}>"


def escape_markdown(text: str) -> str:
    """The text on one line, with everything that markdown or HTML would read as markup made plain."""
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    for mark in _MARKS:
        text = text.replace(mark, f"\\{mark}")
    return text.replace("&", "&amp;")


def model_name(name: str) -> str:
    """How a model or data set is called in public: an absolute path means something on one machine alone, so its last
    part stands for it."""
    return Path(name).name if Path(name).is_absolute() else name
