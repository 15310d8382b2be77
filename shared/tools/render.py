"""What the environment says to the model: results within a byte budget, the closing request, the question."""

from collections.abc import Sequence
from typing import Literal

from shared.tools.table import TOOLS, ParsedTurn, Problem, ToolResult

ClosingReason = Literal["turn_limit", "failed_queries"]

_PROBLEMS: dict[Problem, str] = {
    "no_call": "no tool call found",
    "unclosed_think": "the reasoning was not closed with </think>, so nothing was run",
    "unclean": "the turn holds more than the JSON call, so nothing was run",
}


def problem_result(turn: ParsedTurn) -> ToolResult | None:
    """What to tell the model about a turn with nothing to run; None when the turn has calls."""
    if turn.problem is None:
        return None
    text = (
        f"Error: {_PROBLEMS[turn.problem]}.\n"
        'After </think> write {"tool": "<name>", "args": {...}} and nothing else.\n'
        f"The tools are: {', '.join(TOOLS)}"
    )
    return ToolResult(tool="", outcome="no_call", text=text)


def budget_line(turns_left: int) -> str:
    """`[4 tool turns left before you must answer]`, `turn` in the singular."""
    return f"[{turns_left} tool {'turn' if turns_left == 1 else 'turns'} left before you must answer]"


def render_results(results: Sequence[ToolResult], turns_left: int, max_bytes: int = 24_000, *, dropped: int = 0) -> str:
    """The body of the next user turn: the results in order, then the budget line.

    One result stands bare; several are headed `#1 list_tables`, `#2 …`. `dropped` calls that were not run
    are said. All in all at most `max_bytes` of UTF-8 (but always the budget line): a result that is larger
    than its fair share is cut at a character, and the cut says how much is shown of how much.
    """
    tail = budget_line(turns_left)
    if dropped:
        tail = f"({dropped} more {'call was' if dropped == 1 else 'calls were'} not run)\n{tail}"
    room = max_bytes - _size(tail) - 1
    heads = [f"#{i} {r.tool or 'error'}\n" for i, r in enumerate(results, 1)] if len(results) > 1 else [""]
    bodies = [_encodable(r.text) for r in results]
    fixed = sum(map(_size, heads)) + len(results)  # each result ends with a newline
    shares = _fair_shares([_size(b) for b in bodies], room - fixed)
    parts = [head + cut_text(body, share) for head, body, share in zip(heads, bodies, shares, strict=False)]
    body = cut_text("\n".join(parts), room)
    return f"{body}\n{tail}" if body else tail


def cut_text(text: str, max_bytes: int) -> str:
    """`text` within `max_bytes` of UTF-8: whole, or its beginning and a line that says what was cut.

    Where not even that line fits, as much of the text as does.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return text
    # The number of bytes shown has at most as many digits as the total, so the note's room can be fixed first.
    longest = f"\n... (cut: {len(data)} of {len(data)} bytes shown)"
    keep = max_bytes - len(longest)
    if keep <= 0:
        return data[: max(max_bytes, 0)].decode("utf-8", "ignore")
    kept = data[:keep].decode("utf-8", "ignore")
    return f"{kept}\n... (cut: {_size(kept)} of {len(data)} bytes shown)"


def closing_message(last_good_sql: str | None, reason: ClosingReason = "turn_limit") -> str:
    """The request for the final SQL, showing the last query that ran without error if there is one."""
    first = {
        "turn_limit": "You have reached the exploration limit.",
        "failed_queries": "Too many queries failed in a row.",
    }[reason]
    text = f"{first}\nNow generate the final SQL query to answer the question.\nReturn only the SQL query."
    if last_good_sql is not None:
        text += (
            f"\nYour last query that executed without error was:\n{_encodable(last_good_sql)}\n"
            "If you are not sure of an improvement, return that query."
        )
    return text


def first_user_message(question: str, evidence: str = "", ddl: str | None = None) -> str:
    """The first user turn: the question, its evidence if any, and in `full` mode the schema's DDL."""
    parts = [f"Question: {question}"]
    if evidence.strip():
        parts.append(f"Evidence: {evidence}")
    if ddl is not None:
        parts.append(f"Database schema:\n{ddl}")
    return _encodable("\n".join(parts))


def _fair_shares(sizes: list[int], room: int) -> list[int]:
    """Split `room` bytes: small ones get what they need, the rest share what is left equally."""
    shares = [0] * len(sizes)
    left, waiting = max(room, 0), len(sizes)
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        shares[i] = min(sizes[i], left // waiting)
        left -= shares[i]
        waiting -= 1
    return shares


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _encodable(text: str) -> str:
    """The text with anything that UTF-8 can't hold (lone surrogates) replaced by `?`."""
    return text.encode("utf-8", "replace").decode("utf-8")
