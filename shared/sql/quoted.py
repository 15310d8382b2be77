"""Find the double-quoted names that SQLite quietly read as strings.

`"pricee"` is an identifier, but where no column has that name SQLite takes it for the text 'pricee'. The
engine itself is asked which tokens that happened to: between backticks a name never falls back, so a
statement is compiled again with its double-quoted tokens in backticks, and whatever is then an unknown
column was a string.
"""

import re
import sqlite3

_TOKEN = re.compile(
    r"""'(?:[^']|'')*'?"""
    r"""|"(?:[^"]|"")*"?"""
    r"""|`(?:[^`]|``)*`?"""
    r"""|\[[^\]]*\]?"""
    r"""|--[^\n]*"""
    r"""|/\*.*?(?:\*/|\Z)""",
    re.DOTALL,
)
_NO_SUCH_COLUMN = re.compile(r"no such column: (?P<name>.*)", re.DOTALL)
_MAX_ROUNDS = 16


def quoted_tokens(sql: str) -> list[re.Match[str]]:
    """The double-quoted tokens of `sql`, outside strings, comments and other quotes."""
    return [match for match in _TOKEN.finditer(sql) if match.group()[0] == '"']


def _unquote(token: str) -> str:
    return token[1:-1].replace('""', '"')


def _rewrite(sql: str, tokens: list[re.Match[str]], strings: set[str]) -> str:
    parts, end = [], 0
    for token in tokens:
        name = _unquote(token.group())
        mark = "'" if name in strings else "`"
        written = mark + name.replace(mark, mark * 2) + mark
        parts += [sql[end : token.start()], written]
        end = token.end()
    return "".join([*parts, sql[end:]])


def names_read_as_strings(connection: sqlite3.Connection, sql: str) -> list[str]:
    """Names that `sql`, which compiles on `connection`, puts in double quotes and that match no column.

    The statement is compiled, never run: EXPLAIN returns its program.
    """
    if '"' not in sql:
        return []
    tokens = quoted_tokens(sql)
    names = {_unquote(token.group()) for token in tokens}
    found: list[str] = []
    for _ in range(min(len(names), _MAX_ROUNDS)):
        try:
            # A LIMIT 0 is no substitute: EXPLAIN works for every statement and reads no table.
            connection.execute("EXPLAIN " + _rewrite(sql, tokens, set(found))).close()
            break
        except sqlite3.Error as error:
            match = _NO_SUCH_COLUMN.match(str(error))
            name = match["name"] if match else None
            if name is None or name not in names or name in found:
                break
            found.append(name)
    return found
