"""The executor's dispatch cannot drift from the tool table: every tool runs, with exactly the table's arguments."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.database import Database
from shared.sql.sandbox import Sandbox
from shared.tools import executor as executor_module
from shared.tools.executor import ToolExecutor
from shared.tools.protocol import TOOLS, Call, Tool, parse_turn, validate_call

SAMPLE: dict[str, Any] = {
    "table_name": "item",
    "column_name": "name",
    "table_a": "item",
    "table_b": "kind",
    "limit": 2,
    "sql": "SELECT count(*) FROM item",
}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolExecutor]:
    path: Path = tmp_path_factory.mktemp("drift") / "shop.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """CREATE TABLE kind (id INTEGER PRIMARY KEY, label TEXT);
        CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, kind_id INTEGER REFERENCES kind(id));
        INSERT INTO kind VALUES (1, 'insect');
        INSERT INTO item VALUES (1, 'ant', 1), (2, 'bee', 1), (3, 'fly', 1);"""
    )
    connection.close()
    with Sandbox() as sandbox:
        yield ToolExecutor(Database("shop", path=path), sandbox)


def test_handlers_are_the_table() -> None:
    assert list(executor_module._HANDLERS) == list(TOOLS)


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_every_tool_runs(tool: Tool, executor: ToolExecutor) -> None:
    call = validate_call({"tool": tool.name, "args": {param.name: SAMPLE[param.name] for param in tool.params}})
    assert isinstance(call, Call)
    result = executor.call(call)
    assert result.outcome == ("submitted" if tool.name == "submit_sql" else "ok"), result.text
    assert result.tool == tool.name


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_every_argument_is_read(tool: Tool, executor: ToolExecutor) -> None:
    args = {param.name: SAMPLE[param.name] for param in tool.params}
    for param in tool.params:
        if param.type == "string":
            changed = executor.call(Call(tool.name, {**args, param.name: "no such thing"}))
        else:
            changed = executor.call(Call(tool.name, {**args, param.name: 1}))
        assert changed.text != executor.call(Call(tool.name, args)).text, param.name


def test_a_bad_call_is_answered_with_its_message(executor: ToolExecutor) -> None:
    (bad,) = parse_turn('{"tool": "run_query", "args": {}}').calls
    result = executor.call(bad)
    assert (result.tool, result.outcome) == ("run_query", "bad_call")
    assert "sql" in result.text
