"""From a JSON text to a valid call, or to a message that says what is wrong with it.

Strict: a key given twice, NaN, an argument of another type or one the tool doesn't have is refused, never
guessed at. Strings come through exactly as the JSON held them.
"""

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shared.tools.table import TOOLS, BadCall, BadCallCode, Call, Param

_NEAR_NAME_CHARS = 64  # longer names are not compared: get_close_matches is quadratic
_SHOWN_CHARS = 60


class _Duplicated(dict[str, Any]):
    """A decoded object in which a key was given twice."""

    key: str = ""


@dataclass(frozen=True)
class _NotJson:
    """NaN, Infinity or -Infinity, which Python's decoder knows and JSON doesn't."""

    name: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    duplicated = _Duplicated(value)
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            duplicated.key = key
            break
        seen.add(key)
    return duplicated


def _integer(digits: str) -> int:
    # int() refuses 4,300 digits and is quadratic below that; beyond any limit only the sign matters.
    return int(digits) if len(digits) <= 20 else (-(10**20) if digits[0] == "-" else 10**20)


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer, parse_constant=_NotJson)


def validate_call(value: object) -> Call | BadCall:
    """Check one decoded JSON value `{"tool": …, "args": …}` against the tool table. Never raises.

    "args" may be left out when the tool requires no argument. Anything beside what the table names is refused.
    """
    if not isinstance(value, dict):
        return bad_call(None, "bad_json", f"a call is a JSON object, not {_kind(value)}")
    name = value.get("tool")
    if isinstance(value, _Duplicated):
        return bad_call(None, "duplicate_key", f"the key {_show(value.key)} is given twice")
    if not isinstance(name, str) or name not in TOOLS:
        return _unknown_tool(name)
    tool = TOOLS[name]
    for key in value:
        if key not in ("tool", "args"):
            return bad_call(name, "unknown_field", f'unknown key {_show(key)}; a call has "tool" and "args" only')
    args = value.get("args", {})
    if not isinstance(args, dict):
        return bad_call(name, "bad_args", f'"args" must be a JSON object, not {_kind(args)}; use {tool.signature}')
    if isinstance(args, _Duplicated):
        return bad_call(name, "duplicate_key", f"the argument {_show(args.key)} is given twice")
    known = {param.name: param for param in tool.params}
    for key in args:
        if key not in known:
            return bad_call(name, "unknown_argument", f"unknown argument {_show(key)}; use {tool.signature}")
    checked: dict[str, Any] = {}
    for param in tool.params:
        if param.name not in args:
            if param.required:
                return bad_call(name, "missing_argument", f'argument "{param.name}" is missing; use {tool.signature}')
            checked[param.name] = param.default
            continue
        result = _check(param, args[param.name])
        if isinstance(result, tuple):
            return bad_call(name, result[0], f'argument "{param.name}" {result[1]}; use {tool.signature}')
        checked[param.name] = result
    return Call(name, checked)


def _check(param: Param, value: object) -> str | int | tuple[BadCallCode, str]:
    """The argument as it will be used, or a code and what is wrong."""
    if param.type == "string":
        if not isinstance(value, str):
            return "bad_argument", f"must be a string, not {_kind(value)}"
        if not is_utf8(value):
            return "bad_text", "holds a lone surrogate, which no text can contain"
        if not value.strip():
            return "bad_argument", "is empty"
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        return "bad_argument", f"must be an integer, not {_kind(value)}"
    if param.minimum is not None and value < param.minimum:
        return "bad_argument", f"must be at least {param.minimum}"
    return value if param.maximum is None else min(value, param.maximum)


def is_utf8(text: str) -> bool:
    """False for a text with a lone surrogate, which JSON can spell (`"\\ud800"`) and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def bad_call(tool: str | None, code: BadCallCode, message: str) -> BadCall:
    """A BadCall; where the tool is not known, the message goes on to say how a call is written."""
    if tool is None and code != "unknown_tool":
        message = f'{message}. Write {{"tool": "<name>", "args": {{...}}}} with one of: {", ".join(TOOLS)}'
    return BadCall(tool, code, message)


def _unknown_tool(name: object) -> BadCall:
    shown = _show(name) if isinstance(name, str) else _kind(name)
    near: list[str] = []
    if isinstance(name, str) and len(name) <= _NEAR_NAME_CHARS:
        near = get_close_matches(name.strip().lower().replace("-", "_"), TOOLS, n=2, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    return BadCall(None, "unknown_tool", f"unknown tool {shown}{hint} the tools are: {', '.join(TOOLS)}")


def _show(text: str) -> str:
    """A string of the model's as a message may quote it: short, one line, encodable."""
    cut = text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
    return json.dumps(cut, ensure_ascii=not is_utf8(cut))


def _kind(value: object) -> str:
    """The JSON type of a value, with the value where it is short and telling."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _NotJson():
            return value.name
        case _:
            return "an object"
