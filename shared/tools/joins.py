"""`join_path`: the shortest ways to join two tables over declared keys, and over inferred ones where those don't reach.

An inferred key is one nobody declared: `x_id` (or `xId`, `x_ID`) beside a table `x` or `xs` whose
primary key is a single column, or the same column name with the same type (affinity) in two tables. Every
inferred step is marked, because it may be wrong.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, pairwise, product

from shared.tools.schema import ForeignKey, Schema, Table, fold, show

_MAX_PATHS = 3
_MAX_TARGETS_PER_NAME = 12
# Names that nearly every table has: equal names say nothing about a connection.
_EVERYWHERE = frozenset(
    """
    id name title description type status code date year value notes comment comments created_at updated_at
    """.split()  # noqa: SIM905
)

Neighbours = Callable[[str], dict[str, list[ForeignKey]]]


@dataclass(frozen=True)
class JoinPath:
    """Tables from one end to the other; `keys[i]` are the keys (alternatives) that join tables[i] and tables[i+1]."""

    tables: tuple[str, ...]
    keys: tuple[tuple[ForeignKey, ...], ...]

    @property
    def inferred(self) -> bool:
        return any(key.inferred for step in self.keys for key in step)


def find_join_paths(schema: Schema, start: Table, end: Table) -> tuple[list[JoinPath], bool]:
    """Shortest paths from `start` to `end` (a few of them), and whether there are more. ([], False) = none.

    A table to itself: over a key that refers to its own table. Declared keys come first; when they
    don't connect the two, inferred keys are added: first those that point at a key, then equal names.
    """
    for graph in (_declared, _with_strong_guesses, _with_all_guesses):
        neighbours = graph(schema)
        paths = _self_paths(neighbours, start.name) if start.name == end.name else None
        if paths is None:
            paths = _shortest(neighbours, start.name, end.name)
        found = list(islice(paths, _MAX_PATHS + 1))
        if found:
            return found[:_MAX_PATHS], len(found) > _MAX_PATHS
    return [], False


def _self_paths(neighbours: Neighbours, name: str) -> Iterable[JoinPath]:
    keys = neighbours(name).get(name, [])
    return [JoinPath((name, name), (tuple(keys),))] if keys else []


def _shortest(neighbours: Neighbours, start: str, end: str) -> Iterable[JoinPath]:
    """All shortest paths, by breadth-first search: level by level, remembering every way into a table."""
    came_from: dict[str, list[str]] = {start: []}
    steps: dict[tuple[str, str], tuple[ForeignKey, ...]] = {}
    level = [start]
    while level and end not in came_from:
        following: dict[str, list[str]] = {}
        for here in level:
            for there, keys in neighbours(here).items():
                if there not in came_from:
                    following.setdefault(there, []).append(here)
                    steps[here, there] = tuple(keys)
        came_from |= following
        level = list(following)
    if end not in came_from:
        return
    for tables in _ways(came_from, end):
        yield JoinPath(tables, tuple(steps[pair] for pair in pairwise(tables)))


def _ways(came_from: dict[str, list[str]], end: str) -> Iterable[tuple[str, ...]]:
    """Every way back from `end`, first ones first; a loop, not a recursion: a chain may be 1,000 tables long."""
    unfinished: list[tuple[str, ...]] = [(end,)]
    while unfinished:
        way = unfinished.pop()
        before = came_from[way[0]]
        if not before:
            yield way
        unfinished += [(table, *way) for table in reversed(before)]


@lru_cache(maxsize=256)
def _declared(schema: Schema) -> Neighbours:
    edges: dict[str, dict[str, list[ForeignKey]]] = {}
    for table in schema.tables:
        for key in table.foreign_keys:
            if key.known:
                _add(edges, key)
    return lambda name: edges.get(name, {})


def _add(edges: dict[str, dict[str, list[ForeignKey]]], key: ForeignKey) -> None:
    for here, there in {(key.table, key.target), (key.target, key.table)}:
        keys = edges.setdefault(here, {}).setdefault(there, [])
        if key not in keys:
            keys.append(key)


@lru_cache(maxsize=256)
def _with_strong_guesses(schema: Schema) -> Neighbours:
    return _added(_declared(schema), _guesses(schema)[0])


@lru_cache(maxsize=256)
def _with_all_guesses(schema: Schema) -> Neighbours:
    return _added(_declared(schema), inferred_keys(schema))


def _added(declared: Neighbours, keys: Iterable[ForeignKey]) -> Neighbours:
    """Declared keys where two tables have one, else `keys`."""
    inferred: dict[str, dict[str, list[ForeignKey]]] = {}
    for key in keys:
        _add(inferred, key)
    return lambda name: inferred.get(name, {}) | declared(name)


def inferred_keys(schema: Schema) -> tuple[ForeignKey, ...]:
    """Keys that the names suggest, those that point at a key first."""
    strong, weak = _guesses(schema)
    return strong + weak


@lru_cache(maxsize=256)
def _guesses(schema: Schema) -> tuple[tuple[ForeignKey, ...], tuple[ForeignKey, ...]]:
    """Inferred keys that point at a primary key (or an `id`), and equal names for tables that have no such key."""
    tables = [table for table in schema.tables if table.kind != "view"]
    strong = list(_by_reference_name(tables))
    linked = {frozenset((key.table, key.target)) for key in strong}
    weak: list[ForeignKey] = []
    for key, owned in _by_equal_name(tables):
        if frozenset((key.table, key.target)) not in linked:
            (strong if owned else weak).append(key)
    return tuple(strong), tuple(weak)


def _by_reference_name(tables: Sequence[Table]) -> Iterable[ForeignKey]:
    """`x_id` -> the single-column primary key (or the column `id`) of x."""
    by_name: dict[str, Table] = {}
    for table in tables:
        for spelling in _singulars(table.name):
            by_name.setdefault(spelling, table)
    for table in tables:
        for column in table.columns:
            stem = _stem(column.name)
            target = by_name.get(stem) if stem else None
            if target is None or (target is table and column.name in target.primary_key):
                continue
            end = target.column("id")
            name = target.primary_key[0] if len(target.primary_key) == 1 else end.name if end else None
            if name is not None and not (target is table and name == column.name):
                yield ForeignKey(table.name, (column.name,), target.name, (name,), inferred=True)


def _stem(column: str) -> str | None:
    """`customer` for customer_id, customerId and CustomerID."""
    name = column.lower()
    if name.endswith("_id"):
        return _plain(name[:-3]) or None
    if column.endswith(("Id", "ID")):
        return _plain(name[:-2]) or None
    return None


def _plain(name: str) -> str:
    return name.replace("_", "").replace(" ", "")


def _singulars(table: str) -> list[str]:
    name = _plain(table.lower())
    spellings = [name]
    for ending, instead in (("ies", "y"), ("es", ""), ("s", "")):
        if name.endswith(ending) and len(name) > len(ending) + 1:
            spellings.append(name[: -len(ending)] + instead)
    return spellings


def _affinity(declared: str) -> str:
    """What SQLite makes of a declared type (its documented rules, in order): INT and INTEGER are one type to it."""
    name = declared.upper()
    rules = (
        ("INTEGER", ("INT",)),
        ("TEXT", ("CHAR", "CLOB", "TEXT")),
        ("BLOB", ("BLOB",)),
        ("REAL", ("REAL", "FLOA", "DOUB")),
    )
    for affinity, parts in rules:
        if any(part in name for part in parts):
            return affinity
    return "NUMERIC" if name else "BLOB"


def _by_equal_name(tables: Sequence[Table]) -> Iterable[tuple[ForeignKey, bool]]:
    """The same name and type in two tables, pointing at the one in which the column is the key; and if there is one."""
    groups: dict[tuple[str, str], list[tuple[Table, str]]] = {}
    for table in tables:
        for column in table.columns:
            if fold(column.name) not in _EVERYWHERE:
                groups.setdefault((fold(column.name), _affinity(column.type)), []).append((table, column.name))
    for members in groups.values():
        owners = [member for member in members if member[0].primary_key == (member[1],)]
        targets = owners or members  # nobody's key: everyone with everyone
        # A name that so many tables have, or that is the key of so many, can't say which ones belong together.
        pairs = product(members, targets) if len(targets) <= _MAX_TARGETS_PER_NAME else ()
        seen: set[frozenset[str]] = set()
        for (table, name), (target, target_name) in pairs:
            pair = frozenset((table.name, target.name))
            if table is not target and pair not in seen:
                seen.add(pair)
                yield ForeignKey(table.name, (name,), target.name, (target_name,), inferred=True), bool(owners)


def render_path(path: JoinPath) -> str:
    """`a JOIN b ON a.x = b.y JOIN c ON …`, ready to be used; alternatives to a step follow in their own lines."""
    first, *rest = path.tables
    itself = len(rest) == 1 and rest[0] == first
    parts, inferred, others = [f"{show(first)} AS a" if itself else show(first)], [], []
    for here, there, keys in zip(path.tables, rest, path.keys, strict=False):
        conditions = [_condition(key, here, there, itself) for key in keys]
        parts.append(f"JOIN {show(there)}{' AS b' if itself else ''} ON {conditions[0]}")
        inferred += [condition for key, condition in zip(keys, conditions, strict=True) if key.inferred]
        others += [f"  or: {condition}" for condition in conditions[1:]]
    guessed = [f"  inferred, not declared: {'; '.join(inferred)}"] if inferred else []
    return "\n".join([" ".join(parts), *others, *guessed])


def _condition(key: ForeignKey, here: str, there: str, itself: bool) -> str:
    if itself:
        left, right, pairs = "a", "b", zip(key.columns, key.target_columns, strict=True)
    elif key.table == here:
        left, right, pairs = show(here), show(there), zip(key.columns, key.target_columns, strict=True)
    else:
        left, right, pairs = show(here), show(there), zip(key.target_columns, key.columns, strict=True)
    return " AND ".join(f"{left}.{show(a)} = {right}.{show(b)}" for a, b in pairs)
