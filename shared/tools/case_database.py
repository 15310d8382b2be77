"""The database file of one check case: built by its script, then put into the state that the case is about."""

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from shared.errors import SetupError

KINDS = ("plain", "wal", "locked", "missing", "empty", "garbage", "readonly_dir")
DEFAULT_NAME = "case.sqlite"
DEFAULT_SQL = """
CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT, price REAL);
INSERT INTO item VALUES (1, 'ant', 1.5), (2, 'bee', 2.25), (3, NULL, 3.0);
"""

# Ends without closing the connection, so nothing is checkpointed and the -wal and -shm files stay.
_LEAVE_WAL = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA journal_mode = WAL")
connection.execute("PRAGMA wal_autocheckpoint = 0")
connection.executescript(sys.stdin.read())
os._exit(0)
"""
_HOLD_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def case_database(folder: Path, name: str, kind: str, setup_sql: str) -> Iterator[Path]:
    """Make the file `name` in `folder` and keep it in its state; yields its path.

    SetupError when the script fails or the name leads out of the folder.
    """
    if kind not in KINDS:
        raise SetupError(f"unknown file kind {kind!r}; it is one of {', '.join(KINDS)}")
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts:
        raise SetupError(f"the file name {name!r} does not stay in the case's folder")
    path = Path(f"{folder}/{name}")
    if kind == "missing":
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "garbage":
        path.write_bytes(bytes(range(256)) * 64)
    elif kind == "wal":
        _run(_LEAVE_WAL, path, setup_sql)
    else:
        _build(path, setup_sql)
    if kind == "locked":
        with _locked(path):
            yield path
    elif kind == "readonly_dir":
        with _read_only(path):
            yield path
    else:
        yield path


def _build(path: Path, setup_sql: str) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.executescript(setup_sql)
    except sqlite3.Error as error:
        raise SetupError(f"setup_sql fails: {error}") from error
    finally:
        connection.close()


def _run(script: str, path: Path, text: str) -> None:
    command = [sys.executable, "-I", "-c", script, str(path)]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"setup_sql fails: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-c", _HOLD_LOCK, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        try:
            yield
        finally:
            holder.stdin.close()


@contextlib.contextmanager
def _read_only(path: Path) -> Iterator[None]:
    """Take the write bits from the file and its folder (for root, who may write anyway, they are only a hint)."""
    os.chmod(path, 0o444)
    os.chmod(path.parent, 0o555)
    try:
        yield
    finally:
        os.chmod(path.parent, 0o755)
        os.chmod(path, 0o644)
