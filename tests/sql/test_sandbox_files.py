"""Files in every state: missing, locked, with a log, with a journal, damaged, replaced."""

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.case_database import DEFAULT_SQL, case_database
from tests.sql.conftest import make

SHORT = Limits(seconds=0.3)


@pytest.mark.parametrize(
    ("kind", "words"), [("missing", "does not exist"), ("empty", "0 bytes"), ("garbage", "not a SQLite")]
)
def test_unusable_files_are_set_up_errors(sandbox: Sandbox, tmp_path: Path, kind: str, words: str) -> None:
    with case_database(tmp_path, "a#b.sqlite", kind, "") as path:
        result = sandbox.query(Database("shop", path=path), "SELECT 1")
        assert result.outcome == "setup_error"
        assert words in result.message
        assert "shop" in result.message
        with pytest.raises(SetupError, match=words):
            sandbox.schema(Database("shop", path=path))
    assert sandbox.query(Database("shop", path=tmp_path), "SELECT 1").outcome == "setup_error"
    assert sandbox.query(Database("shop", path=Path("a\0b")), "SELECT 1").outcome == "setup_error"
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in sandbox.query(Database("shop", path=tmp_path / "pipe"), "SELECT 1").message


def test_a_lock_elsewhere_counts_against_the_limit(sandbox: Sandbox, tmp_path: Path) -> None:
    with case_database(tmp_path, "d.sqlite", "locked", DEFAULT_SQL) as path:
        started = time.monotonic()
        result = sandbox.query(Database("d", path=path), "SELECT count(*) FROM item", SHORT)
        assert (result.outcome, time.monotonic() - started < 1.3) == ("timeout", True)
        assert "locked" in result.message
        with pytest.raises(TimeoutError, match="locked"):
            sandbox.schema(Database("d", path=path), seconds=0.2)
    assert sandbox.query(Database("d", path=path), "SELECT count(*) FROM item").rows == [(3,)]


@pytest.mark.parametrize("kept", [("-wal", "-shm"), ("-wal",)])
def test_rows_in_the_log_are_seen_and_nothing_is_written(
    sandbox: Sandbox, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    with case_database(tmp_path, "d.sqlite", "wal", DEFAULT_SQL) as path:
        if "-shm" not in kept:
            Path(f"{path}-shm").unlink()
        names = sorted(os.listdir(tmp_path))
        log = Path(f"{path}-wal").read_bytes()
        for _ in range(2):
            assert sandbox.query(Database("d", path=path), "SELECT count(*) FROM item").rows == [(3,)]
        assert sorted(os.listdir(tmp_path)) == names
        assert Path(f"{path}-wal").read_bytes() == log


def test_a_log_database_that_was_closed_needs_no_new_files(sandbox: Sandbox, tmp_path: Path) -> None:
    database = make(tmp_path / "d.sqlite", "PRAGMA journal_mode = WAL;" + DEFAULT_SQL)
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]
    assert os.listdir(tmp_path) == ["d.sqlite"]
    writer = sqlite3.connect(tmp_path / "d.sqlite")
    writer.execute("INSERT INTO item VALUES (4, 'x', 1)")
    writer.commit()
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(4,)]
    writer.close()


def test_a_hot_journal_is_a_set_up_error(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    crash = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.executescript(sys.argv[2])\n"
        "c.execute('PRAGMA cache_size = 1'); c.execute('BEGIN'); c.execute('CREATE TABLE big(a)')\n"
        "c.execute('INSERT INTO big WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r LIMIT 9999) "
        "SELECT hex(n) FROM r'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", crash, str(path), DEFAULT_SQL], check=True)
    assert Path(f"{path}-journal").exists()
    result = sandbox.query(Database("d", path=path), "SELECT count(*) FROM item")
    assert (result.outcome, "write access" in result.message) == ("setup_error", True)


def test_damage_in_the_file_is_not_the_query_s_fault(sandbox: Sandbox, tmp_path: Path) -> None:
    fill = "CREATE TABLE big(a); WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 5000) "
    database = make(tmp_path / "d.sqlite", DEFAULT_SQL + fill + "INSERT INTO big SELECT 'row ' || n FROM r;")
    assert database.path is not None
    data = bytearray(database.path.read_bytes())
    data[4096 * 5 : 4096 * 12] = b"\xff" * (4096 * 7)
    database.path.write_bytes(data)
    assert sandbox.query(database, "SELECT count(a) FROM big").outcome == "setup_error"
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]


def test_a_file_that_is_replaced_or_changed_is_read_anew(sandbox: Sandbox, items: Database) -> None:
    assert items.path is not None
    assert sandbox.query(items, "SELECT count(*) FROM item").rows == [(3,)]
    other = items.path.with_name("other.sqlite")
    make(other, DEFAULT_SQL + "DELETE FROM item WHERE id > 1;")
    os.replace(other, items.path)
    assert sandbox.query(items, "SELECT count(*) FROM item").rows == [(1,)]
    writer = sqlite3.connect(items.path)
    writer.execute("CREATE TABLE late(x)")
    writer.close()
    assert sandbox.query(items, "SELECT count(*) FROM late").rows == [(0,)]


def test_double_slash_paths(sandbox: Sandbox, items: Database) -> None:
    odd = Database("d", path=Path(f"/{items.path}"))
    assert sandbox.query(odd, "SELECT count(*) FROM item").rows == [(3,)]
