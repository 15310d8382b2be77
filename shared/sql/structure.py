"""What a query looks like, by parsing it with sqlglot: its length, whether it parses, and its join structure.

Nothing here raises for any text: model output is untrusted, and a question's gold may be odd too.
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlglot
from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

# A text beyond this is not worth a parse: sqlglot is pure Python and a model can write anything.
MAX_CHARACTERS = 20_000
_ROUGH_TOKEN = re.compile(r"\w+|[^\w\s]", re.ASCII)


@dataclass(frozen=True)
class JoinStructure:
    """Base tables a query reads, and the column pairs that it equates between two of them; both as sorted multisets.

    A join is a pair of "table.column" texts in sorted order. Names are lower-cased; aliases are resolved. A column
    whose table cannot be told without the schema is written as ".column".
    """

    tables: tuple[str, ...]
    joins: tuple[tuple[str, str], ...]


@lru_cache(maxsize=16_384)
def gold_length(sql: str) -> int:
    """Number of sqlglot tokens of the query in SQLite's dialect: the length that the curriculum ranks by.

    A text that does not tokenize (an unclosed quote) counts words and punctuation marks instead.

    >>> gold_length("SELECT count(*) FROM singer")
    7
    """
    if len(sql) <= MAX_CHARACTERS:
        try:
            return len(sqlglot.tokenize(sql, read="sqlite"))
        except Exception:  # sqlglot raises several kinds, RecursionError among them
            pass
    return len(_ROUGH_TOKEN.findall(sql))


def _parse(sql: str) -> exp.Expression | None:
    """The one statement of the text if it is a query (SELECT, set operation, VALUES, WITH …), else None."""
    if len(sql) > MAX_CHARACTERS:
        return None
    try:
        statements = [
            s for s in sqlglot.parse(sql, read="sqlite") if s is not None and not isinstance(s, exp.Semicolon)
        ]
    except Exception:
        return None
    if len(statements) != 1:
        return None
    statement = statements[0]
    return statement if isinstance(statement, (exp.Query, exp.Values)) else None


def parses(sql: str) -> bool:
    """Whether the text is one query by sqlglot's SQLite grammar; says nothing about its tables existing."""
    return _parse(sql) is not None


def join_structure(sql: str) -> JoinStructure | None:
    """Tables and equi-joins of the whole query, subqueries and CTEs included; None when it does not parse.

    `JOIN … ON a.x = b.y`, `USING (x)` and `FROM a, b WHERE a.x = b.y` give the same structure. A CTE's or
    derived table's own name is not a table; what it reads inside is.
    """
    tree = _parse(sql)
    if tree is None:
        return None
    try:
        tables: list[str] = []
        joins: set[tuple[str, str]] = set()
        for scope in traverse_scope(tree):
            sources = _source_names(scope)
            tables += [name for name in sources.values() if name]
            joins |= _equated_columns(scope, sources)
        return JoinStructure(tuple(sorted(tables)), tuple(sorted(joins)))
    except Exception:
        return None


def _source_names(scope: Scope) -> dict[str, str]:
    """Alias (lower case) -> base table name, or "" for a CTE or derived table, in FROM order."""
    return {
        alias.lower(): source.name.lower() if isinstance(source, exp.Table) else ""
        for alias, (_, source) in scope.selected_sources.items()
    }


def _equated_columns(scope: Scope, sources: dict[str, str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    visible = dict(sources)
    outer = scope.parent
    while outer is not None:  # a correlated subquery equates its columns with those of the queries around it
        visible = _source_names(outer) | visible
        outer = outer.parent
    for node in scope.find_all(exp.EQ):
        left, right = node.left, node.right
        if isinstance(left, exp.Column) and isinstance(right, exp.Column) and left.table.lower() != right.table.lower():
            found.add(_pair(_column_name(left, visible), _column_name(right, visible)))
    order = list(sources)
    for join in scope.find_all(exp.Join):
        right_alias = join.alias_or_name.lower()
        if right_alias not in sources or not join.args.get("using"):
            continue
        position = order.index(right_alias)
        left_alias = order[position - 1] if position else right_alias
        for column in join.args["using"]:
            name = column.name.lower()
            found.add(_pair(f"{sources[left_alias]}.{name}", f"{sources[right_alias]}.{name}"))
    return found


def _column_name(column: exp.Column, sources: dict[str, str]) -> str:
    return f"{sources.get(column.table.lower(), '')}.{column.name.lower()}"


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a <= b else (b, a)


def join_agreement(a: JoinStructure | str | None, b: JoinStructure | str | None) -> float:
    """How far two queries agree on tables and joins, in [0, 1]: Dice over both multisets together.

        2 |A ∩ B| / (|A| + |B|)      with A = tables and joins of a, each counted as often as it occurs

    1.0 for two queries that read no table; 0.0 when either does not parse. Texts are parsed first.
    """
    left = join_structure(a) if isinstance(a, str) else a
    right = join_structure(b) if isinstance(b, str) else b
    if left is None or right is None:
        return 0.0
    features_a, features_b = _features(left), _features(right)
    total = features_a.total() + features_b.total()
    if total == 0:
        return 1.0
    return 2 * (features_a & features_b).total() / total


def _features(structure: JoinStructure) -> Counter[Any]:
    return Counter(structure.tables) + Counter(structure.joins)
