"""The eight tools over one database: a checked call in, a result for the model out.

The schema tools answer from the schema, which is read once; the others run SQL in the sandbox. Nothing
that a model wrote raises here; a database that can't be read does (SetupError), because that is ours.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import Limits, QueryResult, Sandbox
from shared.tools.protocol import SUBMIT, TOOLS, BadCall, Call, Outcome, ToolResult, cut_text
from shared.tools.rows import one_line, render_rows
from shared.tools.schema import Schema, near_names, quote, read_schema, show
from shared.tools.schema_tools import SCHEMA_TOOLS, BadName, did_you_mean, find_column, find_table

_NO_SUCH = re.compile(r"no such (column|table): (.+)", re.DOTALL)
_WORD = re.compile(r"\w+")
# Reading a large schema, which is done once, may take this much longer than a query.
_SCHEMA_GRACE = 0.5


@dataclass(frozen=True)
class ToolLimits:
    """Bounds of one call.

    seconds:      wall time of the SQL behind it.
    query_rows:   rows that run_query shows.
    cell_chars:   characters of a cell that are shown.
    max_bytes:    UTF-8 bytes of a result's text.
    memory_bytes: memory of the SQL behind it.
    max_length:   bytes of a string, a BLOB or a row that the SQL may build.
    """

    seconds: float = 5.0
    query_rows: int = 5
    cell_chars: int = 200
    max_bytes: int = 8_000
    memory_bytes: int = 256 << 20
    max_length: int = 4 << 20


_DEFAULT_LIMITS = ToolLimits()


class ToolExecutor:
    """The tools over one database. Cheap to make: one an episode, which sees one state of the schema.

    Worker processes, schemas and what the schema tools say about them are shared by all executors.
    """

    def __init__(self, database: Database, sandbox: Sandbox, limits: ToolLimits = _DEFAULT_LIMITS) -> None:
        self.database = database
        self._sandbox = sandbox
        self._limits = limits
        self._schema: Schema | None = None

    @property
    def schema(self) -> Schema:
        """The database's schema. SetupError when it can't be read, TimeoutError when that takes too long."""
        if self._schema is None:
            self._schema = read_schema(self.database, self._sandbox, self._limits.seconds + _SCHEMA_GRACE)
        return self._schema

    def ddl(self) -> str:
        """All CREATE statements in creation order, for the mode that shows the schema at once."""
        try:
            return read_schema(self.database, self._sandbox).ddl
        except TimeoutError as error:
            raise SetupError(f"database {self.database.db_id}: {error}") from error

    def call(self, call: Call | BadCall) -> ToolResult:
        """Run one call. SetupError when the database or the sandbox fails; never for what the call says."""
        started = time.perf_counter()
        if isinstance(call, BadCall):
            return self._result(call.tool or "", "bad_call", f"Error: {call.message}", started)
        try:
            if call.tool in SCHEMA_TOOLS:
                return self._look_up(call, started)
            return _SQL_TOOLS[call.tool](self, call, started)
        except BadName as error:
            return self._result(call.tool, "bad_call", f"Error: {one_line(str(error))}", started)
        except TimeoutError as error:  # the schema of a database that another process keeps locked
            return self._result(call.tool, "timeout", f"Error: {error}", started)

    def _look_up(self, call: Call, started: float) -> ToolResult:
        """A schema tool's answer, worked out once for each schema."""
        answers, key = self.schema.answers, (self._limits.max_bytes, call.tool, *call.args.items())
        answer = answers.get(key)
        if answer is None:
            text = SCHEMA_TOOLS[call.tool](self.schema, **call.args)
            answer = answers.setdefault(key, self._result(call.tool, "ok", text, started))
        return ToolResult(call.tool, "ok", answer.text, (), (), time.perf_counter() - started, answer.notes)

    def _result(
        self,
        tool: str,
        outcome: Outcome,
        text: str,
        started: float,
        *,
        query: QueryResult | None = None,
        notes: Iterable[str] = (),
    ) -> ToolResult:
        text = text.encode("utf-8", "replace").decode("utf-8")
        shown = cut_text(text, self._limits.max_bytes)
        notes = (*notes, *(["cut"] if shown != text else []))
        columns, rows = (query.columns, query.rows) if query is not None else ((), [])
        return ToolResult(tool, outcome, shown, columns, rows, time.perf_counter() - started, notes)

    def _sample_rows(self, call: Call, started: float) -> ToolResult:
        table = find_table(self.schema, call.args["table_name"])
        sql = f"SELECT * FROM {quote(table.name)}"
        return self._run(call.tool, sql, call.args["limit"], "rows", started)

    def _distinct_values(self, call: Call, started: float) -> ToolResult:
        table = find_table(self.schema, call.args["table_name"])
        column = find_column(table, call.args["column_name"])
        sql = f"SELECT DISTINCT {quote(column.name)} FROM {quote(table.name)}"
        return self._run(call.tool, sql, call.args["limit"], "values", started)

    def _run_query(self, call: Call, started: float) -> ToolResult:
        return self._run(call.tool, call.args["sql"], self._limits.query_rows, "rows", started, from_model=True)

    def _submit_sql(self, call: Call, started: float) -> ToolResult:
        # Scoring is not a tool's business, and the text must stay whole: no cut here.
        return ToolResult(call.tool, "submitted", call.args["sql"], seconds=time.perf_counter() - started)

    def _run(
        self, tool: str, sql: str, rows: int, things: str, started: float, *, from_model: bool = False
    ) -> ToolResult:
        limits = Limits(
            seconds=self._limits.seconds,
            max_rows=rows,
            max_bytes=2 * self._limits.max_length,
            memory_bytes=self._limits.memory_bytes,
            max_length=self._limits.max_length,
        )
        result = self._sandbox.query(self.database, sql, limits, check_names=from_model)
        if result.outcome == "setup_error":
            raise SetupError(result.message)
        if result.outcome != "ok":
            message = self._explain(result, sql) if from_model else result.message
            prefix = "Refused" if result.outcome == "refused" else "Error"
            return self._result(tool, result.outcome, f"{prefix}: {one_line(message)}", started, query=result)
        lines = [render_rows(result.columns, result.rows, self._limits.cell_chars)]
        if not result.rows:
            lines.append("(no rows)")
        if result.truncated:
            lines.append(f"... (showing first {len(result.rows)} {things}; more {things} exist)")
        notes = [one_line(note) for note in self._unmatched(result, sql)]
        lines += [f"Note: {note}" for note in notes]
        return self._result(tool, "ok", "\n".join(lines), started, query=result, notes=notes)

    def _explain(self, result: QueryResult, sql: str) -> str:
        """The engine's message, with near names when a name in the query is unknown."""
        if result.outcome == "timeout" and "locked" not in result.message:
            return f"the query took longer than {self._limits.seconds:g} s and was stopped"
        match = _NO_SUCH.match(result.message)
        if match is None:
            return result.message
        name = match[2].rsplit(".", 1)[-1].strip('"`[]')
        near = near_names(name, self.schema.names) if match[1] == "table" else self._near_columns(name, sql)
        return f"{result.message}; {did_you_mean(near)}" if near else result.message

    def _unmatched(self, result: QueryResult, sql: str) -> list[str]:
        notes = []
        for name, note in zip(result.unmatched, result.notes, strict=True):
            near = self._near_columns(name, sql)
            notes.append(f"{note}; {did_you_mean(near)}" if near else note)
        return notes

    def _near_columns(self, name: str, sql: str) -> list[str]:
        """Columns that `name` may have meant, of the tables whose names stand in the query (or of all)."""
        words = {word.lower() for word in _WORD.findall(sql)}
        tables = [t for t in self.schema.tables if set(map(str.lower, _WORD.findall(t.name))) <= words]
        homes: dict[str, str] = {}
        for table in tables or self.schema.tables:
            for column in table.columns:
                homes.setdefault(column.name, f"{show(table.name)}.{show(column.name)}")
        return [homes[near] for near in near_names(name, homes)]


_SQL_TOOLS: Mapping[str, Callable[[ToolExecutor, Call, float], ToolResult]] = {
    "sample_rows": ToolExecutor._sample_rows,
    "distinct_values": ToolExecutor._distinct_values,
    "run_query": ToolExecutor._run_query,
    SUBMIT: ToolExecutor._submit_sql,
}
_HANDLERS: Mapping[str, Callable[..., Any]] = {**SCHEMA_TOOLS, **_SQL_TOOLS}
if _HANDLERS.keys() != TOOLS.keys():  # pragma: no cover
    raise RuntimeError(f"tools without a handler, or handlers without a tool: {_HANDLERS.keys() ^ TOOLS.keys()}")
