"""docs/protocol.md says what the code does: its tool table is the table, its harness runs as printed."""

import re
from pathlib import Path
from typing import Any

import pytest

from shared.tools import parse
from shared.tools.protocol import TOOLS, BadCall, Call, ToolResult

DOC = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def test_tool_table() -> None:
    rows = re.findall(r"^\| `(\w+\(.*?\))` \| (.*?)(?: \(at most (\d+)\))? \|$", DOC, re.MULTILINE)
    maxima = {t.name: next((str(p.maximum) for p in t.params if p.maximum), "") for t in TOOLS.values()}
    assert rows == [(tool.signature, tool.doc, maxima[tool.name]) for tool in TOOLS.values()]
    assert f"{parse.MAX_DEPTH} levels" in " ".join(DOC.split())


def _execute(call: Call | BadCall) -> ToolResult:
    if isinstance(call, BadCall):
        return ToolResult(call.tool or "", "bad_call", f"Error: {call.message}")
    sql = call.args.get("sql", "")
    return ToolResult(call.tool, "submitted" if call.tool == "submit_sql" else "ok", sql or "item")


@pytest.mark.parametrize(
    ("turns", "sql", "said"),
    [
        (
            ['{"tool": "list_tables"}', 'hm {"tool": "nope"}', '{"tool": "submit_sql", "args": {"sql": "SELECT 1"}}'],
            "SELECT 1",
            ["[5 tool turns left before you must answer]", "unknown tool"],
        ),
        (
            ['{"tool": "run_query", "args": {"sql": "SELECT 2"}}', *["nothing"] * 5, "```sql\nSELECT 3\n```"],
            "SELECT 3",
            ["no tool call found", "[1 tool turn left", "Your last query that executed without error was:\nSELECT 2"],
        ),
        (['{"tool": "run_query", "args": {"sql": "SELECT 2"}}', *["nothing"] * 6], "SELECT 2", ["[0 tool turns left"]),
    ],
)
def test_the_harness_runs_as_printed(turns: list[str], sql: str, said: list[str]) -> None:
    (source,) = re.findall(r"```python\n(.*?)```\n", DOC, re.DOTALL)
    # The code's own fence has none inside, so this is the whole of it.
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    script = iter(turns)
    seen: list[Any] = []

    def chat(messages: list[dict[str, str]]) -> str:
        seen[:] = messages
        return f"<think>\nplan</think>\n{next(script)}"

    assert namespace["answer"]("How many?", _execute, chat) == sql
    conversation = "\n".join(message["content"] for message in seen)
    assert all(words in conversation for words in said)
    assert next(script, None) is None
