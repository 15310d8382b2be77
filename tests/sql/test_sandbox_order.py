"""Running under reverse_unordered_selects, and ending everything at once."""

import sqlite3
import threading
import time
from pathlib import Path

import pytest

from shared.database import Database
from shared.sql.sandbox import Limits, Sandbox

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"


@pytest.fixture
def shop(tmp_path: Path) -> Database:
    path = tmp_path / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);"
        "INSERT INTO item VALUES (1, 'ant', 1.5), (2, 'bee', 1.5), (3, 'cow', 3.0);"
    )
    connection.close()
    return Database("shop", path=path)


def test_open_orders_run_backwards_and_only_when_asked(shop: Database) -> None:
    sql = "SELECT name FROM item LIMIT 1"
    with Sandbox() as sandbox:
        first = sandbox.query(shop, sql).rows
        assert first == [("ant",)]
        assert sandbox.query(shop, sql, reverse_unordered=True).rows == [("cow",)]
        assert sandbox.query(shop, sql).rows == first
        everything = "SELECT name FROM item ORDER BY id"
        assert sandbox.query(shop, everything, reverse_unordered=True).rows == [("ant",), ("bee",), ("cow",)]


def test_the_guard_stands_when_orders_are_reversed(shop: Database) -> None:
    with Sandbox() as sandbox:
        for sql in ("DELETE FROM item", "PRAGMA reverse_unordered_selects = OFF", "ATTACH 'x' AS y"):
            assert sandbox.query(shop, sql, reverse_unordered=True).outcome == "refused"
        assert sandbox.query(shop, "SELECT count(*) FROM item").rows == [(3,)]


def test_abort_does_not_wait_for_the_query_under_way(shop: Database) -> None:
    sandbox, ended = Sandbox(workers=2), list[object]()

    def ask() -> None:
        try:
            ended.append(sandbox.query(shop, ENDLESS, Limits(seconds=30)))
        except RuntimeError as error:
            ended.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    started = time.monotonic()
    sandbox.abort()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - started < 2
    assert ended == ["the sandbox is closed"] * 3
    sandbox.abort()
