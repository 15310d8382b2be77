"""The one parser of what a model writes: assistant text in, calls out. Never raises, linear in the text.

Reasoning. A `<think>` outside a JSON object opens a block that runs to the next `</think>`. A `</think>`
outside a block and outside a JSON object (the opening tag was in the prompt, or the model closed twice)
makes everything before it reasoning. So of several blocks all are reasoning, a call drafted in any of them
is never run, and `'</think>'` inside the SQL of a call is just text. A block that isn't closed: nothing runs.

Calls. Outside reasoning, every `{` that starts a valid JSON object starts a candidate; the object is a call
when it has the key "tool". Objects inside another object are never calls; objects in an array are. Prose, fences and
other JSON around a call don't hide it, they make the turn unclean. Text that sets out to be a call but isn't
JSON is a `bad_json` call; nothing inside its brackets runs.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shared.tools.table import SUBMIT, BadCall, Call, ParsedTurn, Problem
from shared.tools.validate import DECODER, bad_call, is_utf8, validate_call

_MAX_FINAL_CALLS = 32
MAX_DEPTH = 8  # a call has two levels; the bound keeps the verdict independent of Python's recursion limit
OPEN, CLOSE = "<think>", "</think>"
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

_NEXT = re.compile(r"\{|</?think>")
# What a model writes when it means to call a tool, in or out of JSON: {"tool":, {'tool':, {“args”:, {\"tool\":, {tool:
_INTENT = re.compile(r"""\{\s*(?:\\*["'“”‘’]|)(?:tool|args)(?:\\*["'“”‘’]|)\s*[:=]""")
_INTENT_KEY = re.compile(r"""["'](?:tool|args)["']\s*:""")
_OBJECT_START = re.compile(r'\{\s*["}]')
_FIRST_KEY = re.compile(r'\{\s*"(?:[^"\\]|\\.)*+"\s*:', re.DOTALL)
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
# Lexes a broken object leniently: strings end at a line's end; a new line that starts a call, or </think>, ends it.
_BROKEN = re.compile(r"""(?P<stop>\n(?=[ \t]*\{\s*"tool")|</think>)|"(?:[^"\\\n<]|\\[^\n]|<(?!/think>))*+"?|[{}\[\]]""")
_FENCE_OPEN = re.compile(r"^[ \t]*```(?:[ \t]*(\w*)[ \t]*\n|(sql|sqlite)[ \t])", re.MULTILINE)
_FENCE_CLOSE = re.compile(r"```[ \t]*$", re.MULTILINE)
_SQL_START = re.compile(
    r"(?:\s|--[^\n]*+(?:\n|\Z)|/\*(?:[^*]|\*(?!/))*+\*/|\()*+(?:SELECT|WITH|VALUES)\b", re.IGNORECASE
)


def parse_turn(text: str, *, max_calls: int = 32, strict_format: bool = False) -> ParsedTurn:
    """Read one assistant turn, with the `<think>` that the prompt may have opened put back in front. Never raises.

    `max_calls` bounds what is kept. `strict_format` refuses a turn that isn't clean: no calls, problem "unclean".
    """
    scan = _scan(text, max_calls)
    if scan.open:
        return ParsedTurn(scan.think(text), (), False, "unclosed_think", scan.found)
    problem: Problem | None = None
    calls = tuple(scan.calls)
    if strict_format and scan.found and not scan.clean:
        problem, calls = "unclean", ()
    elif not calls:
        problem = "no_call"
    return ParsedTurn(scan.think(text), calls, scan.clean, problem, scan.found - len(calls))


def parse_final(text: str) -> str | None:
    """The SQL of a closing turn, or None: a submit_sql call, else the last SQL fence, else bare SQL text.

    Bare text counts when it begins like a query (SELECT, WITH, VALUES, after comments or a bracket); it is
    taken whole, without the white space around it and without an end token. Fences count when they say sql,
    sqlite or nothing. A turn with calls but no valid submit_sql has no answer, nor has unfinished reasoning.
    """
    scan = _scan(text, _MAX_FINAL_CALLS)
    if scan.open:
        return None
    for call in scan.calls:
        if isinstance(call, Call) and call.tool == SUBMIT:
            return str(call.args["sql"])
    if scan.calls:
        return None
    answer = _trim(text[scan.answer_start :])
    fences = [body for body in _sql_fences(answer) if body]
    candidates = fences or ([answer] if _SQL_START.match(answer) else [])
    return candidates[-1] if candidates and is_utf8(candidates[-1]) else None


def _sql_fences(text: str) -> Iterator[str]:
    """The bodies of closed fences that are labelled sql or sqlite, or not at all."""
    at = 0
    while (opening := _FENCE_OPEN.search(text, at)) and (closing := _FENCE_CLOSE.search(text, opening.end())):
        if (opening[1] or opening[2] or "sql").lower() in ("sql", "sqlite"):
            yield text[opening.end() : closing.start()].strip()
        at = closing.end()


@dataclass
class _Scan:
    """The state of one pass over a turn."""

    open: bool = False  # inside a reasoning block
    blocks: int = 0  # reasoning blocks closed so far
    thoughts: list[tuple[int, int]] = field(default_factory=list)  # where the reasoning stands in the text
    calls: list[Call | BadCall] = field(default_factory=list)  # those kept
    found: int = 0  # all calls seen outside the first block, kept or not
    noise: bool = False  # something beside calls was seen
    answer_start: int = 0  # where the text after the last reasoning begins

    @property
    def clean(self) -> bool:
        return bool(self.found) and not (self.noise or self.open)

    def think(self, text: str) -> str | None:
        """The reasoning without tags and outer white space; None when there was no block."""
        pieces = (text[a:b].replace(OPEN, "").replace(CLOSE, "").strip() for a, b in self.thoughts)
        return "\n".join(piece for piece in pieces if piece) if self.thoughts else None

    def wants_more(self, max_calls: int) -> bool:
        """False once max_calls are kept or the episode was ended by a valid submit_sql."""
        last = self.calls[-1] if self.calls else None
        return len(self.calls) < max_calls and not (isinstance(last, Call) and last.tool == SUBMIT)


def _scan(text: str, max_calls: int) -> _Scan:
    """One pass over the text: reasoning blocks, calls, and whether there was anything else."""
    scan = _Scan()
    end = _end(text)
    at = start = 0  # all before `at` is dealt with; `start` is where the current stretch of prose began
    while True:
        if scan.open:
            close = text.find(CLOSE, at)
            scan.thoughts.append((at, close if close >= 0 else len(text)))
            if close < 0:
                return scan
            scan.open = False
            scan.blocks += 1
            scan.noise = scan.noise or scan.blocks > 1
            at = start = scan.answer_start = close + len(CLOSE)
            continue
        match = _NEXT.search(text, at, max(at, end))
        here = match.start() if match else max(start, end)
        if match is None or match.group() != "{":
            scan.noise = scan.noise or bool(text[start:here].strip().strip("\ufeff").strip())
        if match is None:
            return scan
        if match.group() == OPEN:
            scan.open = True
            at = match.end()
        elif match.group() == CLOSE:  # all before it was reasoning: as usual at first, noteworthy after a block
            scan.noise = scan.blocks > 0
            scan.found = scan.found if scan.blocks else 0
            scan.calls.clear()
            scan.thoughts = [(0, here)]
            scan.blocks += 1
            at = start = scan.answer_start = match.end()
        else:
            found, at = _read_object(text, here)
            if found is None:
                continue
            scan.noise = scan.noise or bool(text[start:here].strip().strip("\ufeff").strip())
            scan.noise = scan.noise or isinstance(found, BadCall)
            scan.found += 1
            start = at
            if scan.wants_more(max_calls):
                scan.calls.append(found if isinstance(found, BadCall) else validate_call(found))


def _read_object(text: str, start: int) -> tuple[dict[str, Any] | BadCall | None, int]:
    """The object with a "tool" key that begins at the brace `start`, or None, and where to go on reading.

    Where decoding fails, reading goes on behind the failure (or the whole broken call), never at a brace
    inside what was decoded already: no text is decoded twice, and nothing nested is taken for a call.
    """
    if not (_OBJECT_START.match(text, start) or _INTENT.match(text, start)):
        return None, start + 1  # a brace in prose
    end, too_deep = _extent(text, start)
    piece = text[start:end]
    try:
        value, stop = DECODER.raw_decode(piece)
    except json.JSONDecodeError as error:
        failed_at = start + error.pos
        first_key = _FIRST_KEY.match(text, start, failed_at) is None
        intent = _INTENT.match(text, start) or (not first_key and _INTENT_KEY.search(text, start, failed_at))
        if too_deep and error.pos >= len(piece.rstrip()) - 1:  # valid up to the level that is one too many
            end = _skip_broken(text, start)
            if intent or _INTENT_KEY.search(text, start, end):
                return bad_call(None, "too_deep", f"nested more than {MAX_DEPTH} levels deep"), end
            return None, end
        if intent:
            where = f"{error.msg} (character {error.pos + 1} of the object)"
            return bad_call(None, "bad_json", f"not valid JSON: {where}"), _skip_broken(text, start)
        return None, start + 1 if first_key else max(failed_at, start + 1)
    return (value if "tool" in value else None), start + stop


def _extent(text: str, start: int) -> tuple[int, bool]:
    """Where the object at `start` ends if it is JSON: behind its bracket, or (True) at a level too deep, or nowhere.

    Decoding exactly this piece bounds the depth that the decoder recurses to, and what an error costs
    (it counts the lines of the text it is given): without it many small errors would be quadratic.
    """
    if _OBJECT_START.match(text, start) is None:
        return start + 1, False
    depth = 0
    for match in _BRACKET.finditer(text, start):
        token = match.group()
        if token in "{[":
            depth += 1
            if depth > MAX_DEPTH:
                return match.start(), True
        elif token in "}]":
            depth -= 1
            if depth == 0:
                return match.end(), False
    return len(text), False


def _skip_broken(text: str, start: int) -> int:
    """Where a broken object ends: behind its closing bracket, before a new line that starts a call, or at </think>."""
    depth = 0
    for match in _BROKEN.finditer(text, start):
        token = match.group()
        if match.lastgroup == "stop":
            return match.start()
        if token in "{[":
            depth += 1
        elif token in "}]":
            depth -= 1
            if depth <= 0:
                return match.end()
    return len(text)


def _end(text: str) -> int:
    """Where the text ends when white space and end-of-turn tokens behind it don't count."""
    end = len(text)
    while end:
        if text[end - 1].isspace():
            end -= 1
        elif token := next((t for t in END_TOKENS if text.endswith(t, 0, end)), None):
            end -= len(token)
        else:
            break
    return end


def _trim(text: str) -> str:
    """The text without white space or a byte order mark around it and end-of-turn tokens behind it."""
    return text[: _end(text)].strip().lstrip("\ufeff").lstrip()
