"""Result rows as the model reads them: a header line, a line a row, values joined by ` | `.

A value that could be mistaken stands in single quotes as SQL writes it: the text NULL (unlike NULL itself),
an empty text, blanks at either end, the separator inside. A line is a row: line breaks and other control
characters appear escaped, `'a\\nb'`, in quotes, so that an unquoted backslash is always just a backslash.
"""

import re
from collections.abc import Sequence
from typing import Any

_CONTROL = re.compile(r"[\x00-\x1f\x7f\u0080-\u009f\u2028\u2029]")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_AMBIGUOUS = re.compile(r"\s|.*\s\Z|.* \| |'|[xX]'|null\Z|[+-]?inf\Z", re.IGNORECASE | re.DOTALL)
_SEPARATOR = " | "


def render_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], max_cell_chars: int) -> str:
    """Header and rows as text; each cell at most about `max_cell_chars`, and a cut cell says how much is missing."""
    lines = [_SEPARATOR.join([one_line(_cut(name, max_cell_chars)) for name in columns])]
    lines += [_SEPARATOR.join([render_cell(cell, max_cell_chars) for cell in row]) for row in rows]
    return "\n".join(lines)


def one_line(text: str) -> str:
    """Text with line breaks and other control characters escaped: names, messages."""
    return _CONTROL.sub(_escape, text)


def render_cell(cell: Any, max_chars: int) -> str:
    """One value on one line: NULL, a number, text, or a BLOB as X'…'."""
    if cell is None:
        return "NULL"
    if isinstance(cell, str):
        return _render_text(cell, max_chars)
    if isinstance(cell, bytes):
        if len(cell) * 2 <= max_chars:
            return f"X'{cell.hex()}'"
        return f"X'{cell[: max_chars // 4].hex()}…' ({len(cell)} bytes)"
    if isinstance(cell, float) and cell in (float("inf"), float("-inf")):
        return "Inf" if cell > 0 else "-Inf"
    return str(cell)


def _render_text(text: str, max_chars: int) -> str:
    kept, cut = text, ""
    if len(text) > max_chars:
        kept, cut = text[:max_chars], f"… ({len(text)} characters)"
    if _CONTROL.search(kept):
        kept = _CONTROL.sub(_escape, kept.replace("\\", "\\\\"))
    elif text and not _AMBIGUOUS.match(kept):
        return kept + cut
    quoted = kept.replace("'", "''")
    return f"'{quoted}'{cut}"


def _cut(name: str, max_chars: int) -> str:
    return name if len(name) <= max_chars else f"{name[:max_chars]}…"


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match.group()) or f"\\u{ord(match.group()):04x}"
