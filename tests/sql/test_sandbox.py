"""The sandbox as its callers see it: outcomes, limits, odd files, dying workers, threads. Attacks: tests/tools."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.database import Database
from shared.sql.cells import BadText, decode, encode
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.case_database import DEFAULT_SQL
from tests.sql.conftest import make

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
# A single function call: SQLite's progress handler never gets to run.
STUCK = "SELECT instr(printf('%.*c', 4000000, 'a'), printf('%.*c', 2000000, 'a') || 'b')"
SHORT = Limits(seconds=0.3)


def workers_of(sandbox: Sandbox) -> list[int]:
    return [worker.pid for worker in sandbox._idle]


def test_rows_and_columns(sandbox: Sandbox, items: Database) -> None:
    result = sandbox.query(items, "SELECT id, name, price, x'00ff' AS b, 9e999 AS i FROM item ORDER BY id")
    assert (result.outcome, result.columns) == ("ok", ("id", "name", "price", "b", "i"))
    assert result.rows[0] == (1, "ant", 1.5, b"\x00\xff", float("inf"))
    assert result.rows[2][1] is None
    assert not result.truncated


def test_row_limit_says_that_there_is_more(sandbox: Sandbox, items: Database) -> None:
    for limit, n, truncated in ((2, 2, True), (3, 3, False), (4, 3, False), (0, 0, True)):
        result = sandbox.query(items, "SELECT id FROM item", Limits(max_rows=limit))
        assert (len(result.rows), result.truncated) == (n, truncated)


def test_byte_limit(sandbox: Sandbox, items: Database) -> None:
    sql = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 20000) SELECT n, 'xxxxxxxxxx' FROM r"
    assert sandbox.query(items, sql, Limits(max_bytes=100_000)).outcome == "limit"
    assert len(sandbox.query(items, sql, Limits(max_bytes=1_000_000)).rows) == 20_000


def test_a_hundred_thousand_rows_arrive_whole(sandbox: Sandbox, items: Database) -> None:
    sql = (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 100000) "
        "SELECT n, n * 0.5, 'row ' || n, NULL, CAST(n AS BLOB) FROM r"
    )
    result = sandbox.query(items, sql)
    assert result.rows == [(n, n * 0.5, f"row {n}", None, str(n).encode()) for n in range(1, 100_001)]


def test_bad_text_differs_from_every_other_text(sandbox: Sandbox, tmp_path: Path) -> None:
    city = make(
        tmp_path / "city.sqlite",
        "CREATE TABLE city(id, name); INSERT INTO city VALUES (1, 'Oslo'), (2, CAST(x'4dfc6e6368656e' AS TEXT));",
    )
    rows = sandbox.query(city, "SELECT name FROM city ORDER BY id").rows
    bad = rows[1][0]
    assert rows[0] == ("Oslo",)
    assert bad == BadText(b"M\xfcnchen")
    assert set(rows) == set(sandbox.query(city, "SELECT name FROM city").rows)
    for other in ("SELECT 'Mnchen'", "SELECT 'M\ufffdnchen'", "SELECT x'4dfc6e6368656e'"):
        assert set(sandbox.query(city, other).rows) != {(bad,)}, other
    assert json.dumps(str(bad), ensure_ascii=False).encode()


def test_names_that_are_not_utf8(sandbox: Sandbox, tmp_path: Path) -> None:
    ddl = b'CREATE VIRTUAL TABLE "f\xfc" USING fts5(a)'.hex()
    name = "CAST(x'66fc' AS TEXT)"
    rename = (
        f"UPDATE sqlite_master SET name = {name}, tbl_name = {name}, sql = CAST(x'{ddl}' AS TEXT) WHERE name = 'doc'"
    )
    script = f"CREATE VIRTUAL TABLE doc USING fts5(a); PRAGMA writable_schema = ON; {rename};"
    database = make(tmp_path / "d.sqlite", DEFAULT_SQL + script)
    started = time.monotonic()
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]
    assert BadText(b"f\xfc") in [row[0] for row in sandbox.query(database, "SELECT name FROM sqlite_master").rows]
    assert "item" in [table["name"] for table in sandbox.schema(database)]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("sql", [ENDLESS, STUCK])
def test_a_timeout_ends_the_work_and_spares_the_next_call(sandbox: Sandbox, items: Database, sql: str) -> None:
    started = time.monotonic()
    assert sandbox.query(items, sql, SHORT).outcome == "timeout"
    assert time.monotonic() - started < SHORT.seconds + 1
    assert sandbox.query(items, "SELECT 2", SHORT).rows == [(2,)]
    before = cpu_seconds(workers_of(sandbox))
    time.sleep(0.2)
    assert cpu_seconds(workers_of(sandbox)) - before < 0.1  # nothing runs on


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_late_query_does_not_shorten_the_next(sandbox: Sandbox, items: Database) -> None:
    long = ENDLESS.replace("FROM r)", "FROM r LIMIT 400000)")
    assert sandbox.query(items, long, Limits(seconds=5)).outcome == "ok"
    time.sleep(0.1)
    assert sandbox.query(items, "SELECT 3", Limits(seconds=0.5)).rows == [(3,)]


def test_golds_may_quote_literals_doubly_and_models_are_told(sandbox: Sandbox, items: Database) -> None:
    sql = 'SELECT id FROM item WHERE name = "ant"'
    plain, told = sandbox.query(items, sql), sandbox.query(items, sql, check_names=True)
    assert plain.rows == told.rows == [(1,)]
    assert (plain.unmatched, told.unmatched) == ((), ("ant",))
    assert "'ant'" in told.notes[0]


@given(
    cells=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary())
)
def test_cells_cross_the_border_unchanged(cells: list[object]) -> None:
    safe = [c.encode("utf-8", "ignore").decode() if isinstance(c, str) else c for c in cells]
    back = decode(encode([safe]))[0]
    assert back == safe
    assert list(map(type, back)) == list(map(type, safe))
