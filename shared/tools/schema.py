"""What the schema tools know about a database: tables, columns, keys. Read once per database, then pure values."""

import difflib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from shared.database import Database
from shared.sql.sandbox import SCHEMA_SECONDS, Sandbox

Kind = Literal["table", "view", "virtual", "shadow"]
_MAX_CACHED = 256
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# SQLite's keywords that fail or mislead as an unquoted name; the others (match, key, year, …) it takes for names.
_KEYWORDS = frozenset(
    """
    add all alter and as autoincrement between by case cast check collate commit constraint create cross current_date
    current_time current_timestamp default deferrable delete distinct drop else end escape except exists filter foreign
    from full group having if in index inner insert intersect into is isnull join left limit natural not nothing notnull
    null on or order outer over primary raise references returning right select set table then to transaction union
    unique update using values when where window with
    """.split()  # noqa: SIM905
)
_MASTER_SQL = "CREATE TABLE sqlite_master (type TEXT, name TEXT, tbl_name TEXT, rootpage INT, sql TEXT)"


def fold(name: str) -> str:
    """A name as SQLite compares names: ASCII letters without case, all other characters as they are."""
    return name.translate(_ASCII_LOWER)


_ASCII_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


def quote(name: str) -> str:
    """A name in double quotes, always, for SQL that we write."""
    return '"' + name.replace('"', '""') + '"'


def show(name: str) -> str:
    """A name as a model should write it in SQL: quoted only when it must be."""
    return name if _PLAIN_NAME.match(name) and name.lower() not in _KEYWORDS else quote(name)


@dataclass(frozen=True)
class Column:
    """A column. `type`: as declared ("" = not at all). `key`: its place in the primary key, 0 = not in it."""

    name: str
    type: str = ""
    key: int = 0


@dataclass(frozen=True)
class ForeignKey:
    """`table.columns` refer to `target.target_columns`, pairwise. Names are spelt as the tables spell them.

    `known` is False where the target table or column doesn't exist. `inferred`: nobody declared it.
    """

    table: str
    columns: tuple[str, ...]
    target: str
    target_columns: tuple[str, ...]
    known: bool = True
    inferred: bool = False

    def __str__(self) -> str:
        pairs = zip(self.columns, self.target_columns, strict=True)
        text = ", ".join(f"{show(self.table)}.{show(a)} -> {show(self.target)}.{show(b)}" for a, b in pairs)
        return text + (" (inferred)" if self.inferred else "") + ("" if self.known else " (does not exist)")


@dataclass(frozen=True)
class Table:
    """A table or view: its CREATE text, columns in order, declared foreign keys, and unique column sets."""

    name: str
    kind: Kind
    sql: str
    columns: tuple[Column, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()
    unique: tuple[frozenset[str], ...] = ()
    error: str | None = None

    @cached_property
    def _by_name(self) -> Mapping[str, Column]:
        return {fold(column.name): column for column in reversed(self.columns)}

    def column(self, name: str) -> Column | None:
        """The column that SQLite would find under `name`."""
        return self._by_name.get(fold(name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The columns' names, in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def primary_key(self) -> tuple[str, ...]:
        """The names of the primary key's columns, in key order; () without one."""
        return tuple(c.name for c in sorted((c for c in self.columns if c.key), key=lambda c: c.key))


@dataclass(frozen=True, eq=False)
class Schema:
    """All tables and views of one database, in creation order; a virtual table's own storage is left out.

    `notes`: what building the database from its payload skipped or clamped. `answers`: a place for
    whoever answers questions about it to keep the answers. Compared by identity.
    """

    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    answers: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def _by_name(self) -> Mapping[str, Table]:
        return {fold(table.name): table for table in self.tables}

    def table(self, name: str) -> Table | None:
        """The table that SQLite would find under `name` (also sqlite_master, which is not listed)."""
        if fold(name) in ("sqlite_master", "sqlite_schema"):
            names = ("type", "name", "tbl_name", "rootpage", "sql")
            return Table("sqlite_master", "table", _MASTER_SQL, tuple(Column(column) for column in names))
        return self._by_name.get(fold(name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all tables and views."""
        return tuple(table.name for table in self.tables)

    @cached_property
    def references(self) -> Mapping[str, tuple[ForeignKey, ...]]:
        """Declared keys that point at a table, by its name."""
        found: dict[str, list[ForeignKey]] = {}
        for table in self.tables:
            for key in table.foreign_keys:
                found.setdefault(key.target, []).append(key)
        return {name: tuple(keys) for name, keys in found.items()}

    @cached_property
    def ddl(self) -> str:
        """Every CREATE statement, in creation order, each ended by a semicolon."""
        return "\n".join(f"{create_text(table)};" for table in self.tables if table.sql)


def create_text(table: Table) -> str:
    """The CREATE text as stored, with line ends made uniform and outer blanks removed."""
    return table.sql.replace("\r\n", "\n").replace("\r", "\n").strip().rstrip(";")


def near_names(name: str, names: Iterable[str], n: int = 3) -> tuple[str, ...]:
    """Up to `n` of `names` that `name` may have been meant for, best first."""
    by_key: dict[str, str] = {}
    for candidate in names:
        by_key.setdefault(candidate.lower(), candidate)
    wanted = name.lower()
    found = difflib.get_close_matches(wanted[:100], by_key, n=n, cutoff=0.6)
    if len(wanted) >= 3:  # "customer" for "tbl_customer_2024": too far for difflib, near for a reader
        found += [key for key in by_key if (wanted in key or (len(key) >= 3 and key in wanted)) and key not in found]
    return tuple(by_key[key] for key in found[:n])


def parse_schema(raw: list[dict[str, Any]], notes: tuple[str, ...] = ()) -> Schema:
    """Build a Schema from what `Sandbox.schema` returns; foreign keys get the spelling of what they point at."""
    bare = [
        Table(
            name=entry["name"],
            kind=entry["kind"],
            sql=entry["sql"],
            columns=tuple(
                Column(name, declared or "", int(key))
                for name, declared, _, _, key, hidden in entry["columns"]
                if hidden != 1  # a virtual table's arguments; generated columns are 2 and 3
            ),
            unique=tuple(frozenset(columns) for columns in entry["unique"]),
            error=entry["error"],
        )
        for entry in raw
        if entry["kind"] != "shadow"
    ]
    by_name = {fold(table.name): table for table in bare}
    keys = {entry["name"]: entry["foreign_keys"] for entry in raw}
    return Schema(
        tuple(
            Table(t.name, t.kind, t.sql, t.columns, _foreign_keys(t, keys[t.name], by_name), t.unique, t.error)
            for t in bare
        ),
        notes,
    )


def _foreign_keys(table: Table, rows: list[list[Any]], by_name: Mapping[str, Table]) -> tuple[ForeignKey, ...]:
    grouped: dict[int, list[list[Any]]] = {}
    for row in rows:
        grouped.setdefault(row[0], []).append(row)
    keys = []
    for parts in reversed(grouped.values()):  # SQLite lists a table's keys last first
        columns = tuple(_spelt(table, part[3]) for part in parts)
        target_name = str(parts[0][2])
        target = by_name.get(fold(target_name))
        targets: tuple[str, ...]
        if target is None:
            targets = tuple(part[4] or "?" for part in parts)
            keys.append(ForeignKey(table.name, columns, target_name, targets, known=False))
            continue
        if parts[0][4] is None:  # "REFERENCES t" without columns means its primary key
            targets = target.primary_key if len(target.primary_key) == len(parts) else ("?",) * len(parts)
        else:
            targets = tuple(_spelt(target, part[4]) for part in parts)
        known = all(target.column(name) is not None for name in targets)
        keys.append(ForeignKey(table.name, columns, target.name, targets, known))
    return tuple(keys)


def _spelt(table: Table, name: str) -> str:
    column = table.column(name)
    return name if column is None else column.name


class _Cache:
    """Schemas by database and state of its file, shared by all executors of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._schemas: OrderedDict[str, tuple[Any, Schema]] = OrderedDict()

    def get(self, database: Database, sandbox: Sandbox, seconds: float) -> Schema:
        name, state = _state(database)
        with self._lock:
            held = self._schemas.get(name)
            if held is not None and held[0] == state is not None:
                self._schemas.move_to_end(name)
                return held[1]
        schema = parse_schema(sandbox.schema(database, seconds), sandbox.build_notes(database))
        with self._lock:
            self._schemas[name] = (state, schema)
            self._schemas.move_to_end(name)
            if len(self._schemas) > _MAX_CACHED:
                self._schemas.popitem(last=False)
        return schema


def _state(database: Database) -> tuple[str, Any]:
    """A database's name in the cache, and what must be the same for a schema read earlier to hold still."""
    if database.path is None:
        return database.content_hash, ()
    path = str(database.path)
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path, None  # whoever opens it says what is wrong with it
    try:
        log = os.stat(f"{path}-wal").st_size
    except OSError:
        log = 0
    return path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, log)


_cache = _Cache()


def read_schema(database: Database, sandbox: Sandbox, seconds: float = SCHEMA_SECONDS) -> Schema:
    """The database's schema, from the cache while its file is unchanged.

    SetupError when it can't be read; TimeoutError when that takes longer than `seconds`.
    """
    return _cache.get(database, sandbox, seconds)
