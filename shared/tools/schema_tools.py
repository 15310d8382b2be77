"""The tools that answer from the schema alone: pure functions of a Schema and the call's arguments, giving text."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from shared.tools.joins import find_join_paths, inferred_keys, render_path
from shared.tools.rows import one_line
from shared.tools.schema import Column, Schema, Table, create_text, near_names, show

_NAMES_SHOWN = 30
_GUESSES_SHOWN = 20


class BadName(Exception):
    """A table or column that doesn't exist; the message is for the model."""


def list_tables(schema: Schema) -> str:
    """The names of all tables and views, one a line."""
    lines = [one_line(table.name) + (" (view)" if table.kind == "view" else "") for table in schema.tables]
    return "\n".join(lines) or "(the database has no tables)"


def describe_table(schema: Schema, table_name: str) -> str:
    """The CREATE text. BadName for an unknown table."""
    table = find_table(schema, table_name)
    text = create_text(table) or f"{show(table.name)} has no CREATE statement"
    return text if table.error is None else f"{text}\n(it cannot be queried: {table.error})"


def foreign_keys(schema: Schema, table_name: str) -> str:
    """Declared keys from and to the table; where there is none, those that the names suggest. BadName as above."""
    table = find_table(schema, table_name)
    keys = [*table.foreign_keys]
    keys += [key for key in schema.references.get(table.name, ()) if key not in keys]
    if keys:
        return _lines(map(str, keys))
    guesses = [key for key in inferred_keys(schema) if table.name in (key.table, key.target)]
    return _lines(["(no foreign key is declared)", *map(str, guesses[:_GUESSES_SHOWN])])


def join_path(schema: Schema, table_a: str, table_b: str) -> str:
    """The shortest ways to join two tables, as SQL. BadName for an unknown table."""
    start, end = find_table(schema, table_a), find_table(schema, table_b)
    paths, more = find_join_paths(schema, start, end)
    if not paths and start.name == end.name:
        return _lines([f"({show(start.name)} has no key to itself)"])
    if not paths:
        return _lines([f"(no path of keys joins {show(start.name)} and {show(end.name)})"])
    lines = [render_path(path) for path in paths]
    if more:
        lines.append(f"... (showing {len(paths)} of several paths of this length)")
    return "\n".join(lines)


SCHEMA_TOOLS: Mapping[str, Callable[..., str]] = {
    "list_tables": list_tables,
    "describe_table": describe_table,
    "foreign_keys": foreign_keys,
    "join_path": join_path,
}


def find_table(schema: Schema, name: str) -> Table:
    """The table that SQLite would find. BadName offers near names, or all when none is near."""
    table = schema.table(name)
    if table is None:
        raise BadName(f"there is no table {_quoted(name)}; {_known('the tables', name, schema.names)}")
    return table


def find_column(table: Table, name: str) -> Column:
    """The column that SQLite would find. BadName as in `find_table`."""
    column = table.column(name)
    if column is None:
        raise BadName(f"{show(table.name)} has no column {_quoted(name)}; {_known('its columns', name, table.names)}")
    return column


def did_you_mean(names: Iterable[str]) -> str:
    """The question that follows a name that isn't there."""
    return f"did you mean {', '.join(names)}?"


def _known(things: str, name: str, names: Sequence[str]) -> str:
    if near := near_names(name, names):
        return did_you_mean(map(show, near))
    more = ", …" if len(names) > _NAMES_SHOWN else ""
    return f"{things} are: {', '.join(map(show, names[:_NAMES_SHOWN]))}{more}"


def _quoted(name: str) -> str:
    return f'"{name if len(name) <= 100 else name[:100] + "…"}"'


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(map(one_line, lines))
