"""The tools' answers: golden texts in executor_cases.jsonl, budgets, caching, set-up errors, real databases."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.database import Database, Payload
from shared.errors import SetupError
from shared.sql.sandbox import BadText, Sandbox
from shared.tools import executor as executor_module
from shared.tools.case_database import DEFAULT_SQL
from shared.tools.executor import ToolExecutor, ToolLimits
from shared.tools.protocol import TOOLS, BadCall, Call, ToolResult, validate_call
from shared.tools.rows import render_cell, render_rows
from shared.tools.schema import fold, near_names, quote, read_schema, show
from tests.tools.nasty import build, nasty_databases

CASES = [
    json.loads(line) for line in Path(__file__).with_name("executor_cases.jsonl").read_text("utf-8").split("\n") if line
]

LIMITS = ToolLimits()


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as pool:
        yield pool


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Database]:
    return nasty_databases(tmp_path_factory.mktemp("nasty"))


def run(database: Database, sandbox: Sandbox, tool: str, limits: ToolLimits = LIMITS, **args: Any) -> ToolResult:
    call = validate_call({"tool": tool, "args": args})
    assert isinstance(call, Call), call
    return ToolExecutor(database, sandbox, limits).call(call)


@pytest.mark.parametrize("case", CASES, ids=[f"{case['call']['tool']}: {case['note']}" for case in CASES])
def test_golden_text(case: dict[str, Any], databases: dict[str, Database], sandbox: Sandbox) -> None:
    result = run(databases[case["database"]], sandbox, case["call"]["tool"], **case["call"]["args"])
    assert (result.outcome, result.text) == (case["outcome"], case["text"])


def test_every_tool_of_the_table_has_a_golden_case() -> None:
    assert {case["call"]["tool"] for case in CASES} == set(TOOLS) == set(executor_module._HANDLERS)


def test_every_tool_answers_on_every_table(databases: dict[str, Database], sandbox: Sandbox) -> None:
    for name, database in databases.items():
        assert list(walk(database, sandbox, tables=25)) == [], name


def walk(database: Database, sandbox: Sandbox, tables: int) -> Iterator[str]:
    """Every tool on (the first) tables and columns; yields what was neither ok nor explained by the table itself."""
    executor = ToolExecutor(database, sandbox, ToolLimits(seconds=1))
    schema = executor.schema
    calls = [Call("list_tables", {})]
    for table in schema.tables[:tables]:
        calls += [Call(tool, {"table_name": table.name}) for tool in ("describe_table", "foreign_keys")]
        calls += [Call("join_path", {"table_a": schema.tables[0].name, "table_b": table.name})]
        calls += [Call("sample_rows", {"table_name": table.name, "limit": 3})]
        calls += [Call("run_query", {"sql": f"SELECT * FROM {quote(table.name)}"})]
        calls += [
            Call("distinct_values", {"table_name": table.name, "column_name": column.name, "limit": 3})
            for column in table.columns[:20]
        ]
    broken = {table.name for table in schema.tables if table.error is not None} | {"endless"}
    for call in calls:
        result = executor.call(call)
        result.text.encode("utf-8")
        about = call.args.get("table_name") or call.args.get("sql", "").removeprefix("SELECT * FROM ").strip('"')
        if result.outcome != "ok" and about not in broken:
            yield f"{call}: {result.outcome} {result.text}"


def test_every_tool_answers_on_every_real_database(test_data: Path, sandbox: Sandbox) -> None:
    files = sorted((test_data / "data").rglob("*.sqlite"))
    assert len(files) > 100
    for file in files:
        before = hashlib.sha256(file.read_bytes()).digest()
        assert list(walk(Database(file.stem, path=file), sandbox, tables=8)) == [], file
        assert hashlib.sha256(file.read_bytes()).digest() == before


def test_every_tool_answers_on_every_real_payload(test_data: Path, sandbox: Sandbox) -> None:
    for line in (test_data / "data/sqale/sqale2_schemas/train.jsonl").read_text("utf-8").split("\n"):
        if line:
            row = json.loads(line)
            database = Database(row["schema_id"], payload=Payload(row["full_schema"], row["schema_content"]))
            assert list(walk(database, sandbox, tables=240)) == [], row["schema_id"]


def test_result_bytes_bound_every_text(databases: dict[str, Database], sandbox: Sandbox) -> None:
    for max_bytes in (0, 1, 40, 300, 3000):
        limits = ToolLimits(seconds=1, max_bytes=max_bytes)
        for result in (
            run(databases["wide"], sandbox, "describe_table", limits, table_name="wide"),
            run(databases["wide"], sandbox, "sample_rows", limits, table_name="wide", limit=5),
            run(databases["many"], sandbox, "list_tables", limits),
            run(databases["values"], sandbox, "sample_rows", limits, table_name="v", limit=50),
            run(databases["values"], sandbox, "run_query", limits, sql="SELECT 'ä' AS é FROM nope"),
        ):
            assert len(result.text.encode()) <= max_bytes
    whole = run(databases["many"], sandbox, "list_tables", ToolLimits(max_bytes=10**6)).text
    cut = run(databases["many"], sandbox, "list_tables", ToolLimits(max_bytes=100))
    assert whole.startswith(cut.text.split("\n... (cut")[0])
    assert "cut" in cut.notes


def test_submitted_sql_is_whole(databases: dict[str, Database], sandbox: Sandbox) -> None:
    sql = "SELECT 1 -- " + "x" * 50_000
    result = run(databases["kinds"], sandbox, "submit_sql", sql=sql)
    assert (result.outcome, result.text) == ("submitted", sql)


def test_a_bad_call_gets_its_message(databases: dict[str, Database], sandbox: Sandbox) -> None:
    bad = validate_call({"tool": "run_query", "args": {"sql": 5}})
    assert isinstance(bad, BadCall)
    result = ToolExecutor(databases["kinds"], sandbox).call(bad)
    assert (result.tool, result.outcome, result.text) == ("run_query", "bad_call", f"Error: {bad.message}")
    assert ToolExecutor(databases["kinds"], sandbox).call(BadCall(None, "unknown_tool", "no")).tool == ""


def test_rows_are_kept_for_scorers_and_text_for_the_model(databases: dict[str, Database], sandbox: Sandbox) -> None:
    result = run(databases["values"], sandbox, "run_query", sql="SELECT t, b FROM v WHERE id IN (2, 6)")
    assert result.columns == ("t", "b")
    assert list(result.rows) == [(None, bytes(20000)), (BadText(b"M\xfcnchen"), BadText(b"\x80"))]
    assert len(result.text) < 400


def test_the_schema_is_read_once_and_again_when_the_file_changes(tmp_path: Path, sandbox: Sandbox) -> None:
    database = build(tmp_path, "d", DEFAULT_SQL)
    first = read_schema(database, sandbox)
    assert read_schema(Database("other id", path=database.path), sandbox) is first
    assert database.path is not None
    connection = sqlite3.connect(database.path)
    connection.execute("CREATE TABLE late (x)")
    connection.close()
    assert read_schema(database, sandbox).names == ("item", "late")
    assert "late" in run(database, sandbox, "list_tables").text


def test_set_up_errors_are_raised_by_every_tool(tmp_path: Path, sandbox: Sandbox) -> None:
    missing = Database("shop", path=tmp_path / "no.sqlite")
    values = {"table_name": "t", "table_a": "a", "table_b": "b", "column_name": "c", "sql": "SELECT 1"}
    for tool in TOOLS.values():
        args = {param.name: values.get(param.name, 5) for param in tool.params}
        if tool.name != "submit_sql":
            with pytest.raises(SetupError, match=r"shop.*does not exist"):
                ToolExecutor(missing, sandbox).call(Call(tool.name, args))
    with pytest.raises(SetupError):
        ToolExecutor(missing, sandbox).ddl()
    assert list(tmp_path.iterdir()) == []


def test_the_ddl_of_full_mode_can_be_run_again(databases: dict[str, Database], sandbox: Sandbox) -> None:
    for name in ("names", "keys", "empty"):
        ddl = ToolExecutor(databases[name], sandbox).ddl()
        connection = sqlite3.connect(":memory:")
        connection.executescript(ddl)
        again = [
            row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        ]
        assert again == list(read_schema(databases[name], sandbox).names)


def test_join_paths_run(databases: dict[str, Database], sandbox: Sandbox) -> None:
    """What join_path proposes is SQL: every path between any two tables compiles."""
    for name in ("keys", "names"):
        names = [t.name for t in read_schema(databases[name], sandbox).tables if t.kind == "table"]
        found = 0
        for a in names:
            for b in names:
                text = run(databases[name], sandbox, "join_path", table_a=a, table_b=b).text
                for line in text.split("\n"):
                    if " JOIN " in line and not line.startswith(" "):
                        found += 1
                        assert (
                            run(databases[name], sandbox, "run_query", sql=f"SELECT 1 FROM {line}").outcome == "ok"
                        ), line
        assert found


@given(text=st.text(max_size=300), chars=st.integers(1, 50))
def test_a_cell_is_one_line_and_never_mistaken(text: str, chars: int) -> None:
    shown = render_cell(text, chars)
    assert "\n" not in shown
    assert shown not in ("NULL", "")
    if len(text) <= chars and "'" not in shown:
        assert shown == text  # unquoted means untouched


@given(
    rows=st.lists(
        st.lists(st.none() | st.text(max_size=8) | st.integers() | st.binary(max_size=4), min_size=2, max_size=2)
    )
)
def test_a_row_is_one_line_of_as_many_values(rows: list[list[Any]]) -> None:
    lines = render_rows(["a", "b"], rows, 20).split("\n")
    assert len(lines) == len(rows) + 1
    if not any(isinstance(cell, str) and "|" in cell for row in rows for cell in row):
        assert all(len(line.split(" | ")) == 2 for line in lines)


def test_null_and_its_look_alikes_differ() -> None:
    cells = [None, "NULL", "null", "", " ", "'NULL'", "X'00'", b"\x00", "Inf", float("inf"), "-inf", float("-inf")]
    assert len({render_cell(cell, 100) for cell in cells}) == len(cells)


def test_names_fold_as_in_sqlite() -> None:
    assert fold("Äb_C") == "Äb_c"
    assert (show("a b"), show("order"), show("x"), show("1a"), show('"')) == ('"a b"', '"order"', "x", '"1a"', '""""')
    connection = sqlite3.connect(":memory:")
    for name in ("order", "group", "index", "match", "year", "key", "left", "a", "no", "values", "window", "end"):
        connection.execute(f"CREATE TABLE {quote(name)} ({quote(name)} INT)")
        connection.execute(
            f"SELECT {show(name)}.{show(name)} FROM {show(name)} JOIN {show(name)} AS z ON z.{show(name)} = 1"
        )


def test_near_names() -> None:
    names = ["singer", "concert", "singer_in_concert", "Stadium"]
    assert near_names("singr", names)[0] == "singer"
    assert near_names("STADIUM", names) == ("Stadium",)
    assert near_names("qqqq", names) == ()
    assert near_names("x" * 10**6, names) == ()
    assert len(near_names("concert", names)) <= 3
