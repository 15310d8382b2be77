"""Many statements at once give what each gives alone."""

import os
import random
import sqlite3
import time
from pathlib import Path

import pytest

from shared.database import Database, Payload
from shared.sql.sandbox import BadText, Limits, QueryResult, Sandbox

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
SLOWISH = ENDLESS.replace("FROM r)", "FROM r LIMIT 400000)")
STATEMENTS = [
    "SELECT name FROM item ORDER BY id",
    "SELECT FROM WHERE",
    "SELECT 1; SELECT 2",
    "DELETE FROM item",
    "PRAGMA table_info(item)",
    "SELECT CAST(x'4dfc' AS TEXT), x'00', 9e999, NULL",
    "SELECT 'it''s', '{\"b\": \"00\"}'",
    SLOWISH,
    "SELECT zeroblob(100000000)",
    "",
    "SELECT abs(-9223372036854775808)",
    "SELECT name FROM item WHERE 0",
]


@pytest.fixture
def shop(tmp_path: Path) -> Database:
    path = tmp_path / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO item VALUES (1, 'ant'), (2, 'bee');"
    )
    connection.close()
    return Database("shop", path=path)


def essence(result: QueryResult) -> tuple[object, ...]:
    return (result.outcome, result.columns, result.rows, result.message, result.truncated)


@pytest.mark.parametrize("seed", range(3))
def test_each_result_is_that_of_the_statement_alone(shop: Database, seed: int) -> None:
    statements = random.Random(seed).choices(STATEMENTS, k=150)
    limits = Limits(seconds=5, max_rows=1 if seed == 2 else None)
    with Sandbox() as sandbox:
        alone = {sql: essence(sandbox.query(shop, sql, limits)) for sql in STATEMENTS}
        together = sandbox.query_many(shop, statements, limits)
    assert [essence(result) for result in together] == [alone[sql] for sql in statements]
    assert any(isinstance(cell, BadText) for result in together for row in result.rows for cell in row)


def test_one_that_never_ends_takes_only_its_own_time(shop: Database) -> None:
    statements = ["SELECT 1"] * 40 + [ENDLESS] + ["SELECT 2"] * 40
    with Sandbox() as sandbox:
        sandbox.query(shop, "SELECT 1")
        started = time.monotonic()
        results = sandbox.query_many(shop, statements, Limits(seconds=1))
        taken = time.monotonic() - started
    assert [r.rows for r in results if r.outcome == "ok"] == [[(1,)]] * 40 + [[(2,)]] * 40
    assert results[40].outcome == "timeout"
    assert taken < 5


def test_results_that_are_large_together_come_one_by_one(shop: Database) -> None:
    sql = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 3000) SELECT n, 'xxxxxxxx' FROM r"
    limits = Limits(max_bytes=100_000)
    with Sandbox() as sandbox:
        assert {r.outcome for r in sandbox.query_many(shop, [sql] * 20, limits)} == {"ok"}
        assert {r.outcome for r in sandbox.query_many(shop, [sql] * 3, Limits(max_bytes=10_000))} == {"limit"}


def test_payloads_and_missing_files(tmp_path: Path) -> None:
    payload = Database("p", payload=Payload("CREATE TABLE t (a INT);", '{"t": [{"a": 1}]}'))
    missing = Database("gone", path=tmp_path / "gone.sqlite")
    with Sandbox() as sandbox:
        assert [r.rows for r in sandbox.query_many(payload, ["SELECT a FROM t", "SELECT a + 1 FROM t"])] == [
            [(1,)],
            [(2,)],
        ]
        results = sandbox.query_many(missing, ["SELECT 1", "SELECT 2"])
        assert [r.outcome for r in results] == ["setup_error", "setup_error"]
        assert all("does not exist" in r.message for r in results)
        assert sandbox.query_many(payload, []) == []
    assert os.listdir(tmp_path) == []


def test_open_orders_reversed(shop: Database) -> None:
    with Sandbox() as sandbox:
        plain = sandbox.query_many(shop, ["SELECT name FROM item LIMIT 1"] * 3)
        reverse = sandbox.query_many(shop, ["SELECT name FROM item LIMIT 1"] * 3, reverse_unordered=True)
        again = sandbox.query_many(shop, ["SELECT name FROM item LIMIT 1"] * 3)
    assert [r.rows for r in plain] == [r.rows for r in again] == [[("ant",)]] * 3
    assert [r.rows for r in reverse] == [[("bee",)]] * 3
