"""In a worker: read a database's schema as plain data, object by object, so that one broken view costs only itself."""

import sqlite3
from typing import Any

from shared.sql.cells import RawText


def _text(value: Any) -> Any:
    return value.raw.decode("utf-8", "replace") if isinstance(value, RawText) else value


def _rows(connection: sqlite3.Connection, sql: str, parameters: tuple[Any, ...] = ()) -> list[list[Any]]:
    return [[_text(cell) for cell in row] for row in connection.execute(sql, parameters)]


def read_schema(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Every table and view in creation order: name, kind, sql, columns, foreign keys, unique keys, error.

    columns: [name, declared type, not null, default, position in the primary key (0 = none), hidden]
    foreign_keys: [id, sequence, target table, own column, target column or None]
    unique: lists of column names, one for each unique index without expressions or conditions
    kind: "table", "view", "virtual" or "shadow" (a virtual table's own storage)
    error: why the columns could not be read (a view over a missing table), else None
    """
    kinds = {
        row[0]: row[1] for row in _rows(connection, "SELECT name, type FROM pragma_table_list WHERE schema = 'main'")
    }
    objects = []
    listing = "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY rowid"
    for name, kind, sql in _rows(connection, listing):
        if name.lower().startswith("sqlite_"):
            continue
        entry: dict[str, Any] = {"name": name, "kind": kinds.get(name, kind), "sql": sql or "", "error": None}
        entry |= {"columns": [], "foreign_keys": [], "unique": []}
        objects.append(entry)
        try:
            entry["columns"] = _rows(
                connection, 'SELECT name, type, "notnull", dflt_value, pk, hidden FROM pragma_table_xinfo(?)', (name,)
            )
            entry["foreign_keys"] = _rows(
                connection,
                'SELECT id, seq, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id, seq',
                (name,),
            )
            if kind == "table":
                entry["unique"] = _unique_keys(connection, name)
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise
            entry["error"] = str(error)
    return objects


def _unique_keys(connection: sqlite3.Connection, table: str) -> list[list[str]]:
    keys: dict[str, list[Any]] = {}
    sql = (
        "SELECT l.name, i.name FROM pragma_index_list(?) AS l, pragma_index_info(l.name) AS i "
        'WHERE l."unique" AND NOT l.partial ORDER BY l.seq, i.seqno'
    )
    for index, column in _rows(connection, sql, (table,)):
        keys.setdefault(index, []).append(column)
    return [columns for columns in keys.values() if None not in columns]
