"""The tool table, and the values that pass between model, parser and executor.

`TOOLS` is the one place that knows which tools exist: the system prompt, the validation of calls and
the executor's dispatch are generated from it or checked against it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

ParamType = Literal["string", "integer"]


@dataclass(frozen=True)
class Param:
    """One argument of a tool. An optional one has a `default`.

    Integers below `minimum` are refused; above `maximum` they are lowered to it, because "as many as
    possible" is a sensible wish and the result says that more rows exist.
    """

    name: str
    type: ParamType
    default: int | str | None = None
    minimum: int | None = None
    maximum: int | None = None

    @property
    def required(self) -> bool:
        """True when the call must give it."""
        return self.default is None


@dataclass(frozen=True)
class Tool:
    """A tool the model may call: its name, its arguments in order, and the line the prompt says about it."""

    name: str
    doc: str
    params: tuple[Param, ...] = ()

    @property
    def signature(self) -> str:
        """The tool as the prompt and the error messages write it, e.g. `sample_rows(table_name, limit=5)`."""
        args = (p.name if p.required else f"{p.name}={p.default}" for p in self.params)
        return f"{self.name}({', '.join(args)})"


_TABLE = Param("table_name", "string")
_SQL = Param("sql", "string")


def _limit(default: int, maximum: int) -> Param:
    return Param("limit", "integer", default=default, minimum=1, maximum=maximum)


TOOLS: Mapping[str, Tool] = MappingProxyType(
    {
        tool.name: tool
        for tool in (
            Tool("list_tables", "the names of all tables and views"),
            Tool("describe_table", "the CREATE statement of a table", (_TABLE,)),
            Tool("foreign_keys", "the keys from and to a table", (_TABLE,)),
            Tool(
                "join_path",
                "the shortest way to join two tables",
                (Param("table_a", "string"), Param("table_b", "string")),
            ),
            Tool("sample_rows", "a few rows of a table", (_TABLE, _limit(5, 50))),
            Tool(
                "distinct_values",
                "the values that a column holds",
                (_TABLE, Param("column_name", "string"), _limit(20, 100)),
            ),
            Tool("run_query", "run a query and see its first rows", (_SQL,)),
            Tool("submit_sql", "hand in your final query; this ends the episode", (_SQL,)),
        )
    }
)

SUBMIT = "submit_sql"

BadCallCode = Literal[
    "bad_json",  # looks like a call, but isn't JSON (message says where it breaks)
    "too_deep",  # nested deeper than any call needs
    "duplicate_key",  # a key given twice: no telling which one was meant
    "unknown_tool",
    "unknown_field",  # a key beside "tool" and "args"
    "bad_args",  # "args" isn't an object
    "missing_argument",
    "unknown_argument",
    "bad_argument",  # wrong type, empty, or out of range
    "bad_text",  # a string that no UTF-8 text can hold (a lone surrogate)
]


@dataclass(frozen=True)
class Call:
    """A valid call: a known tool, every argument present (defaults filled in) and of its type.

    Strings are exactly what the JSON held: nothing is stripped, unescaped twice or repaired.
    """

    tool: str
    args: dict[str, Any]


@dataclass(frozen=True)
class BadCall:
    """A call that can't be run. `message` tells the model what was wrong and what is allowed.

    `tool` is the tool's name when that much was understood, else None.
    """

    tool: str | None
    code: BadCallCode
    message: str


Problem = Literal["no_call", "unclosed_think", "unclean"]


@dataclass(frozen=True)
class ParsedTurn:
    """What one assistant turn asks for. Field by field:

    - `think`: the reasoning without its tags, None when the turn has none.
    - `calls`: the calls in the order written, good and bad; nothing after the first valid submit_sql.
    - `clean`: after the reasoning came well-formed JSON call objects and nothing else.
    - `problem`: why there is nothing to run ("unclean" only under strict_format), else None.
    - `dropped`: calls that were seen and are not in `calls`: after a submit_sql, beyond max_calls, in an
      unclean turn under strict_format, or between a reasoning block and a later `</think>`.
    """

    think: str | None
    calls: tuple[Call | BadCall, ...]
    clean: bool
    problem: Problem | None
    dropped: int


Outcome = Literal["ok", "refused", "sql_error", "bad_call", "no_call", "timeout", "limit", "setup_error", "submitted"]


@dataclass(frozen=True)
class ToolResult:
    """What came back from one call. `text` is what the model sees; `rows` (of a query) is what scorers see.

    `tool` is "" for a call whose tool is unknown. `seconds` is wall time. `notes` are remarks that are
    already part of `text` (a misspelt column, a cut), kept for reports.
    """

    tool: str
    outcome: Outcome
    text: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[Any, ...]] = field(default_factory=tuple)
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
