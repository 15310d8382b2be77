"""Build a database in memory from a row payload, exactly as the `sqale` package (0.2.0) does, and say what was lost.

The package opens its own unguarded connection and passes over whatever fails without a word; a worker
may do neither. So the rules are restated here, and the tests hold the outcome against the package's own
`build_database`, row by row. The rules: the DDL is split at every `;` (also inside strings); a statement
that fails is skipped; a table's columns are the keys of its first row object; rows go in with INSERT OR
IGNORE; a row that fails is skipped; integers beyond 64 bits and infinite floats are clamped; nested
values become JSON text.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_FLOAT_MAX = 1.7976931348623157e308
_MAX_NOTES = 20
_REFUSED = frozenset(
    {sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_PRAGMA, sqlite3.SQLITE_CREATE_TEMP_TABLE}
)


def _authorize(action: int, _first: str | None, second: str | None, _db: str | None, _by: str | None) -> int:
    """DDL from a dataset may create and fill tables; it may not reach files, settings or native code."""
    if action in _REFUSED:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in ("load_extension", "fts3_tokenizer"):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


class _Notes:
    """The first few things that went wrong, and how many more there were."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.more = 0

    def add(self, line: str) -> None:
        if len(self.lines) < _MAX_NOTES:
            self.lines.append(line if len(line) <= 300 else line[:299] + "…")
        else:
            self.more += 1

    def result(self) -> list[str]:
        return [*self.lines, f"and {self.more} more"] if self.more else self.lines


class _Rows:
    """Iterates over a table's rows as parameter lists, counting the rows taken and the values clamped."""

    def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        self._rows = iter(rows)
        self._columns = columns
        self.clamped = 0
        self.taken = 0

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        get = next(self._rows).get
        self.taken += 1
        return [self._value(get(column)) for column in self._columns]

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or value is None or kind is bool:
            return value
        if kind is int:
            if _INT64_MIN <= value <= _INT64_MAX:
                return value
            self.clamped += 1
            return max(_INT64_MIN, min(_INT64_MAX, value))
        if kind is float:
            if -_FLOAT_MAX <= value <= _FLOAT_MAX:
                return value
            # max(-m, min(m, nan)) is m: a NaN, which JSON text can spell, is clamped like an infinity.
            self.clamped += 1
            return max(-_FLOAT_MAX, min(_FLOAT_MAX, value))
        return json.dumps(value)


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _fill(connection: sqlite3.Connection, table: str, content: Any, notes: _Notes) -> None:
    if not isinstance(content, list):
        notes.add(f"table {table}: its content is not a list of rows, skipped")
        return
    rows = [row for row in content if isinstance(row, dict)]
    if len(rows) < len(content):
        notes.add(f"table {table}: {len(content) - len(rows)} entries are not row objects, skipped")
    if not rows:
        return
    columns = list(rows[0])
    names, marks = ", ".join(map(_quote, columns)), ", ".join("?" * len(columns))
    sql = f"INSERT OR IGNORE INTO {_quote(table)} ({names}) VALUES ({marks})"
    parameters, reason, before = _Rows(rows, columns), "", connection.total_changes
    while True:  # a failing row has been taken from the iterator: go on with the one after it
        taken = parameters.taken
        try:
            kept = connection.executemany(sql, parameters).rowcount
            break
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            if _interrupted(error):
                raise
            reason = f": {error}"
            if parameters.taken == taken:  # not a row but the statement fails: no such table or column
                break
    if reason:
        kept = connection.total_changes - before
    if kept < len(rows):
        notes.add(f"table {table}: {len(rows) - kept} of {len(rows)} rows skipped{reason or ' (a constraint)'}")
    if parameters.clamped:
        notes.add(f"table {table}: {parameters.clamped} numbers outside SQLite's range clamped")
    unknown = {key for row in rows for key in row.keys() - rows[0].keys()}
    if unknown:
        notes.add(f"table {table}: keys missing from its first row were not read: {', '.join(sorted(unknown))}")


def _interrupted(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT


def build(full_schema: str, schema_content: str, expired: Callable[[], bool]) -> tuple[bytes, list[str]]:
    """Return the database's image and notes on what was lost.

    The image is what `Connection.serialize` gives, b"" for a database without any table. `expired` is
    polled while SQLite works; once true, the build stops with sqlite3.OperationalError.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.set_authorizer(_authorize)
        connection.set_progress_handler(expired, 10_000)
        notes = _Notes()
        for statement in re.split(r";\s*", full_schema):
            if not (statement := statement.strip()):
                continue
            try:
                connection.execute(statement)
            except (sqlite3.Error, UnicodeEncodeError) as error:
                if _interrupted(error):
                    raise
                notes.add(f"DDL skipped ({error}): {' '.join(statement.split())[:120]}")
        # What the schema does from here on (checks, triggers) is held back by trusted_schema.
        connection.set_authorizer(None)
        content: Any = {}
        if schema_content:
            try:
                content = json.loads(schema_content)
            except (ValueError, RecursionError) as error:
                notes.add(f"the row content is not JSON, no rows: {error}")
        if isinstance(content, dict):
            for table, rows in content.items():
                _fill(connection, table, rows, notes)
        else:
            notes.add("the row content is not an object of tables, no rows")
        connection.commit()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        return connection.serialize() if pages else b"", notes.result()
    finally:
        connection.close()
