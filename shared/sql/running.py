"""In a worker: run one statement on an open connection, and give every way it can end its name."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared.sql.cells import encode
from shared.sql.guard import READ_ONLY
from shared.sql.opening import Opened
from shared.sql.quoted import names_read_as_strings

_FIRST_ROWS, _MOST_ROWS, _CHUNK_BYTES = 8, 2048, 256 << 10
# Extended codes of SQLITE_READONLY that speak of the file's state (a hot journal, …), not of the SQL.
_FILE_STATE = frozenset({264, 520, 776, 1032, 1288, 1544})
_FILE_FAULT = frozenset(
    {
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_CORRUPT_VTAB = 267  # what full-text tables also say about a malformed search expression


class Failed(Exception):
    """A statement that ended otherwise than well: an outcome of `shared.sql.sandbox` and a message."""

    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message


def failure(outcome: str, message: str, started: float) -> bytes:
    """The answer for a call that failed; `started` is its time.monotonic()."""
    return encode({"outcome": outcome, "message": message, "seconds": time.monotonic() - started})


def is_locked(error: sqlite3.Error) -> bool:
    return _code(error) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _code(error: sqlite3.Error) -> int:
    code = getattr(error, "sqlite_errorcode", None)
    return sqlite3.SQLITE_ERROR if code is None else int(code)


def classify(error: sqlite3.Error) -> Failed:
    """What a SQLite error means for whoever wrote the statement."""
    code = _code(error)
    primary, text = code & 0xFF, str(error)
    if primary == sqlite3.SQLITE_INTERRUPT:
        return Failed("timeout", "the query took too long")
    if primary == sqlite3.SQLITE_TOOBIG or isinstance(error, sqlite3.DataError):
        return Failed("limit", "a value, a row or the query text is larger than is allowed")
    if primary == sqlite3.SQLITE_FULL:
        return Failed("limit", "the query needs more space than is allowed")
    if code in _FILE_STATE:
        return Failed("setup_error", f"the file cannot be read as it is ({text}); open it once with write access")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_PERM) or "may not be modified" in text:
        return Failed("refused", f"{text}: {READ_ONLY}")
    if primary in _FILE_FAULT and code != _CORRUPT_VTAB:
        return Failed("setup_error", f"the file cannot be read: {text}")
    if "one statement at a time" in text:
        return Failed("sql_error", "only one statement can be run at a time")
    if "Incorrect number of bindings" in text or "binding parameter" in text:
        return Failed("sql_error", "the query has parameters (? or :name); write the values into it")
    return Failed("sql_error", text)


@contextmanager
def named_errors(opened: Opened) -> Iterator[None]:
    """Turn what sqlite3 raises into `Failed`; locks and undecodable text pass through, the caller tries again."""
    try:
        yield
    except sqlite3.Error as error:
        opened.guard.plain = False
        if opened.guard.denied is not None:
            raise Failed("refused", opened.guard.denied) from error
        if is_locked(error) or (is_bad_text(error) and not opened.lenient_text):
            raise
        raise classify(error) from error
    except (UnicodeError, ValueError) as error:  # a lone surrogate or a NUL in the text; an odd column name
        opened.guard.plain = False
        raise Failed("sql_error", f"the query cannot be read: {error}") from error


def is_bad_text(error: sqlite3.Error) -> bool:
    """True for the fetch error that TEXT which is not UTF-8 causes."""
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith("Could not decode to UTF-8")


def run_query(
    opened: Opened,
    sql: str,
    *,
    max_rows: int | None,
    max_bytes: int,
    names: bool,
    expired: Callable[[], bool],
    started: float,
) -> bytes:
    """Run `sql` and return the encoded answer; Failed when it did not end well.

    At most `max_rows` rows (None = all) of together `max_bytes` encoded bytes. `names` asks for the
    double-quoted names that SQLite read as strings.
    """
    cursor = opened.connection.cursor()
    try:
        cursor.execute(sql)
        if cursor.description is None:
            raise Failed("sql_error", "there is no statement in the query")
        columns = [column[0] for column in cursor.description]
        rows, truncated = _fetch(cursor, max_rows, max_bytes, expired)
    finally:
        cursor.close()
    unmatched = names_read_as_strings(opened.connection, sql) if names else []
    head: dict[str, Any] = {"outcome": "ok", "columns": columns, "truncated": truncated, "unmatched": unmatched}
    head["seconds"] = time.monotonic() - started
    return encode(head)[:-1] + b',"rows":[' + b",".join(rows) + b"]}"


def _fetch(
    cursor: sqlite3.Cursor, max_rows: int | None, max_bytes: int, expired: Callable[[], bool]
) -> tuple[list[bytes], bool]:
    """Encoded runs of rows, and whether there were more than `max_rows`. Encoding at once bounds the memory."""
    parts: list[bytes] = []
    bytes_left, step = max_bytes, _FIRST_ROWS
    rows_left = float("inf") if max_rows is None else max_rows
    while True:
        chunk = cursor.fetchmany(int(min(step, rows_left + 1)))
        more = len(chunk) > rows_left
        if more:
            del chunk[int(rows_left) :]
        if chunk:
            part = encode(chunk)[1:-1]
            bytes_left -= len(part)
            if bytes_left < 0:
                raise Failed("limit", f"the result is larger than {max_bytes} bytes")
            parts.append(part)
            rows_left -= len(chunk)
            step = min(step * 2, _MOST_ROWS) if len(part) < _CHUNK_BYTES else max(step // 2, 1)
        if more or not chunk:
            return parts, more
        if expired():
            raise Failed("timeout", "the query took too long")
