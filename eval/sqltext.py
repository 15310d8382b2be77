"""What a gold query's text says about its result: whether it orders its rows, asks the clock, or cuts through ties.

A small tokenizer, because each question is about one level of parentheses and must not be fooled by strings, comments
or quoted names. It never fails: SQL that SQLite would refuse gets an answer too, which nobody then needs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(
    r"""(?P<string>'(?:[^']|'')*'?|"(?:[^"]|"")*"?)"""
    r"""|(?P<name>`(?:[^`]|``)*`?|\[[^\]]*\]?)"""
    r"""|(?P<comment>--[^\n]*|/\*.*?(?:\*/|\Z))"""
    r"""|(?P<word>[^\W\d]\w*)"""
    r"""|(?P<number>\d[\w.]*)"""
    r"""|(?P<other>\S)""",
    re.DOTALL,
)
_CLOCK_WORDS = frozenset({"CURRENT_DATE", "CURRENT_TIME", "CURRENT_TIMESTAMP"})
_CHANCE = frozenset({"RANDOM", "RANDOMBLOB"})
_DATES = frozenset({"DATE", "TIME", "DATETIME", "JULIANDAY", "UNIXEPOCH", "STRFTIME", "TIMEDIFF"})
_MAX_COLUMNS = 40


@dataclass(frozen=True)
class Token:
    """One token outside comments. `group` names the parentheses it stands in: the index of the opening one, -1 outside.

    `text` is upper-case for words, the content for strings, and as written otherwise.
    """

    kind: str
    text: str
    start: int
    group: int


def tokens(sql: str) -> list[Token]:
    """The tokens of `sql`, comments left out."""
    found: list[Token] = []
    groups = [-1]
    for match in _TOKEN.finditer(sql):
        kind, text = str(match.lastgroup), match.group()
        if kind == "comment":
            continue
        if kind == "word":
            text = text.upper()
        elif kind == "string":
            text = text[1:-1] if len(text) > 1 and text[-1] == text[0] else text[1:]
        if text == ")" and kind == "other" and len(groups) > 1:
            groups.pop()
        found.append(Token(kind, text, match.start(), groups[-1]))
        if text == "(" and kind == "other":
            groups.append(len(found) - 1)
    return found


@lru_cache(maxsize=4096)
def orders_result(sql: str) -> bool:
    """True when the statement itself has an ORDER BY: not one of a subquery, a window or an aggregate.

    >>> orders_result("SELECT a FROM t ORDER BY a"), orders_result("SELECT a FROM (SELECT a FROM t ORDER BY a)")
    (True, False)
    """
    found = tokens(sql)
    return any(token.group == -1 and _is_order(found, i) for i, token in enumerate(found))


def asks_the_clock(sql: str) -> bool:
    """True when the text asks for the current time or for chance: CURRENT_DATE and the like, `date('now')`, `date()`,
    a strftime without a time, random(). A view that does so behind its name is not seen.

    >>> asks_the_clock("SELECT date('now')"), asks_the_clock("SELECT 'now', date(born) FROM t")
    (True, False)
    """
    found = tokens(sql)
    for i, token in enumerate(found):
        if token.kind != "word":
            continue
        if token.text in _CLOCK_WORDS:
            return True
        if not (i + 1 < len(found) and found[i + 1].text == "(" and found[i + 1].kind == "other"):
            continue
        if token.text in _CHANCE:
            return True
        if token.text in _DATES:
            inside = [t for t in found if t.group == i + 1 and not (t.kind == "other" and t.text == ")")]
            arguments = 1 + sum(t.kind == "other" and t.text == "," for t in inside) if inside else 0
            if arguments <= (token.text == "STRFTIME") or any(
                t.kind == "string" and t.text.casefold() == "now" for t in inside
            ):
                return True
    return False


def tie_variants(sql: str, width: int) -> list[str]:
    """`sql` twice, with every ORDER BY … LIMIT extended by its own result columns: ascending, then descending.

    Rows that tie in the ORDER BY are then cut in two opposite orders. Where that changes the result, it depended on
    an order that the SQL leaves to the engine. `width` is the number of columns of the statement's result; that of a
    subquery is read off its text (1 when it can't be). Nothing to vary gives [].

    >>> tie_variants("SELECT a, b FROM t ORDER BY c LIMIT 1", 2)[1]
    'SELECT a, b FROM t ORDER BY c , 1 DESC, 2 DESC LIMIT 1'
    """
    found = tokens(sql)
    places: list[tuple[int, int]] = []
    for i, token in enumerate(found):
        if token.kind == "word" and token.text == "LIMIT":
            before = [j for j in range(i) if found[j].group == token.group]
            if any(_is_order(found, j) for j in before):
                places.append((token.start, width if token.group == -1 else _columns([found[j] for j in before])))
    if not places:
        return []
    return [_extended(sql, places, direction) for direction in ("ASC", "DESC")]


def _extended(sql: str, places: Sequence[tuple[int, int]], direction: str) -> str:
    parts, end = [], 0
    for start, columns in places:
        terms = "".join(f", {n} {direction}" for n in range(1, min(columns, _MAX_COLUMNS) + 1))
        parts += [sql[end:start], terms, " "]
        end = start
    return "".join([*parts, sql[end:]])


def _is_order(found: Sequence[Token], i: int) -> bool:
    return (
        found[i].kind == "word"
        and found[i].text == "ORDER"
        and i + 1 < len(found)
        and found[i + 1].kind == "word"
        and found[i + 1].text == "BY"
    )


def _columns(level: Sequence[Token]) -> int:
    """How many columns the last SELECT among the tokens of one level lists; 1 when a star makes that uncertain."""
    words = [(i, t.text) for i, t in enumerate(level) if t.kind == "word"]
    start = max((i for i, text in words if text == "SELECT"), default=0)
    end = next((i for i, text in words if i > start and text in ("FROM", "WHERE", "ORDER", "GROUP")), len(level))
    listed = level[start + 1 : end]
    if any(t.kind == "other" and t.text == "*" for t in listed):
        return 1
    return 1 + sum(t.kind == "other" and t.text == "," for t in listed)
