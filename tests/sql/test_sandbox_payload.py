"""Databases built from row payloads: exactly what the sqale package builds, and nothing lost in silence."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqale
from hypothesis import given
from hypothesis import strategies as st

from shared.database import Database, Payload
from shared.errors import SetupError
from shared.sql.payload import build
from shared.sql.sandbox import Sandbox

NAMES = st.sampled_from(["a", "b", "A", "order", 'we"ird', "x y", "id"])
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5).map(lambda text: text.encode("utf-8", "ignore").decode())
    | st.lists(st.integers(), max_size=2)
)
DDL = st.sampled_from(
    [
        "CREATE TABLE a (id INTEGER PRIMARY KEY, b TEXT NOT NULL, 'x y' REAL)",
        "CREATE TABLE b (id INTEGER, a INT UNIQUE) STRICT",
        'CREATE TABLE "order" (a, b, "we""ird", CHECK (a <> 1))',
        "CREATE TABLE broken (",
        "CREATE TABLE t (a TEXT DEFAULT ';')",
        "CREATE INDEX i ON a (b)",
        "INSERT INTO a VALUES (1, 'x', 2)",
        "CREATE VIEW v AS SELECT * FROM a",
    ]
)


def dump(connection: sqlite3.Connection) -> list[str]:
    return list(connection.iterdump())


def built(full_schema: str, schema_content: str) -> tuple[list[str], list[str]]:
    image, notes = build(full_schema, schema_content, lambda: False)
    connection = sqlite3.connect(":memory:")
    if image:
        connection.deserialize(image)
    return dump(connection), notes


def by_package(full_schema: str, schema_content: str) -> list[str]:
    return dump(sqale.build_database({"full_schema": full_schema, "schema_content": schema_content}))


@given(
    ddl=st.lists(DDL, max_size=5),
    content=st.dictionaries(NAMES, st.lists(st.dictionaries(NAMES, VALUES, min_size=1), max_size=4)),
)
def test_same_as_the_package(ddl: list[str], content: dict[str, Any]) -> None:
    texts = ";\n".join(ddl), json.dumps(content)
    assert built(*texts)[0] == by_package(*texts)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"a": 5}', '{"a": [1, {"id": 4, "b": "x"}]}', '{"a": [{"id": 1e400, "b": "x"}]}'],
)
def test_same_as_the_package_on_odd_content(content: str) -> None:
    ddl = "CREATE TABLE a (id INTEGER PRIMARY KEY, b TEXT)"
    assert built(ddl, content)[0] == by_package(ddl, content)


def test_same_as_the_package_on_real_payloads(test_data: Path) -> None:
    for split in ("train", "test"):
        for line in (test_data / f"data/sqale/sqale2_schemas/{split}.jsonl").read_text().splitlines():
            row = json.loads(line)
            assert built(row["full_schema"], row["schema_content"])[0] == by_package(
                row["full_schema"], row["schema_content"]
            )


def test_what_is_lost_is_said() -> None:
    ddl = "CREATE TABLE a (id INTEGER PRIMARY KEY, n TEXT NOT NULL); CREATE TABEL b (x); CREATE TABLE c (x INT) STRICT;"
    content = {
        "a": [
            {"id": 1, "n": "x"},
            {"id": 1, "n": "y"},
            {"id": 2, "n": None},
            {"id": 2**70, "n": "z"},
            {"id": 4, "n": "k", "m": 1},
        ],
        "b": [{"x": 1}],
        "c": [{"x": "text"}, {"x": 2}],
        "d": "rows",
    }
    _, notes = built(ddl, json.dumps(content))
    text = "\n".join(notes)
    for part in (
        "DDL skipped",
        "CREATE TABEL b",
        "table a: 2 of 5 rows skipped (a constraint)",
        "table a: 1 numbers outside",
        "table a: keys missing from its first row were not read: m",
        "table b: 1 of 1 rows skipped: no such table: b",
        "table c: 1 of 2 rows skipped",
        "table d: its content is not a list",
    ):
        assert part in text, text
    assert built("CREATE TABLE a (x)", "{")[1][0].startswith("the row content is not JSON")
    assert built("CREATE TABLE a (x)", '{"a": [{"x": 1}]}')[1] == []
    assert built(";".join(["nonsense"] * 50), "{}")[1][-1] == "and 30 more"


def test_a_payload_reaches_no_file(tmp_path: Path) -> None:
    ddl = f"ATTACH '{tmp_path}/x.db' AS z; CREATE TABLE z.t (a); PRAGMA temp_store_directory = '{tmp_path}'"
    _, notes = built(ddl, "{}")
    assert len(notes) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as pool:
        yield pool


def test_query_and_notes_through_the_sandbox(sandbox: Sandbox) -> None:
    payload = Payload(
        "CREATE TABLE a (id INTEGER PRIMARY KEY, b TEXT)", '{"a": [{"id": 1, "b": "x"}, {"id": 1, "b": "y"}]}'
    )
    database = Database("d", payload=payload)
    assert sandbox.build_notes(database) == ("table a: 1 of 2 rows skipped (a constraint)",)
    for _ in range(3):
        assert sandbox.query(database, "SELECT * FROM a").rows == [(1, "x")]
        assert sandbox.query(database, "DELETE FROM a").outcome == "refused"
    assert sandbox.query(Database("e", payload=Payload("CREATE TABLE q (x)", "")), "SELECT count(*) FROM q").rows == [
        (0,)
    ]
    assert sandbox.query(database, "SELECT count(*) FROM a").rows == [(1,)]


def test_a_payload_without_a_table_is_an_empty_database(sandbox: Sandbox) -> None:
    database = Database("d", payload=Payload("nonsense", "{}"))
    assert sandbox.query(database, "SELECT count(*) FROM sqlite_master").rows == [(0,)]
    assert sandbox.query(database, "SELECT * FROM a").outcome == "sql_error"
    assert len(sandbox.build_notes(database)) == 1


def test_an_endless_payload_is_a_set_up_error(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.sql.sandbox._BUILD_SECONDS", 0.3)
    ddl = "CREATE TABLE a AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    database = Database("d", payload=Payload(ddl, "{}"))
    result = sandbox.query(database, "SELECT 1")
    assert (result.outcome, "cannot be built" in result.message) == ("setup_error", True)
    with pytest.raises(SetupError):
        sandbox.build_notes(database)
