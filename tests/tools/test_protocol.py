"""The protocol against golden cases: every line of parse_cases.jsonl and final_cases.jsonl is one test."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shared.tools import protocol
from shared.tools.protocol import (
    EXEC_PLAN_TOOL_INSTRUCTIONS,
    TOOLS,
    BadCall,
    Call,
    Param,
    Tool,
    instructions,
    parse_final,
    parse_turn,
    problem_result,
    validate_call,
)

HERE = Path(__file__).parent


def read_cases(name: str) -> list[Any]:
    cases = [json.loads(line) for line in (HERE / name).read_text().splitlines()]
    return [pytest.param(case, id=case["id"]) for case in cases]


@pytest.mark.parametrize("case", read_cases("parse_cases.jsonl"))
def test_turn(case: dict[str, Any]) -> None:
    turn = parse_turn(case["text"], max_calls=case.get("max_calls", 32), strict_format=case.get("strict", False))
    found = [{"tool": c.tool, "args": c.args} if isinstance(c, Call) else c.code for c in turn.calls]
    assert found == [wanted.get("bad", wanted) for wanted in case["calls"]], case["note"]
    assert (turn.clean, turn.problem, turn.dropped) == (case["clean"], case["problem"], case["dropped"])
    if "think" in case:
        assert turn.think == case["think"]
    for call, wanted in zip(turn.calls, case["calls"], strict=True):
        if isinstance(call, BadCall):
            assert call.tool == wanted.get("tool")
            assert all(words in call.message for words in wanted["says"]), call.message
            assert len(call.message.encode("utf-8")) < 600
    assert (problem_result(turn) is None) == bool(turn.calls)


@pytest.mark.parametrize("case", read_cases("final_cases.jsonl"))
def test_final(case: dict[str, Any]) -> None:
    assert parse_final(case["text"]) == case["sql"], case["note"]


def test_every_bad_call_names_the_tools_or_the_field() -> None:
    for param in read_cases("parse_cases.jsonl"):
        case = param.values[0]
        for call in parse_turn(case["text"]).calls:
            if isinstance(call, BadCall):
                names_tools = all(name in call.message for name in TOOLS)
                field = call.tool is not None and re.search(r'"(args|\w|\\u)', call.message)
                assert names_tools or field, (case["id"], call.message)


def test_problem_message_names_the_tools() -> None:
    result = problem_result(parse_turn("hello"))
    assert result is not None
    assert result.outcome == "no_call"
    assert all(name in result.text for name in TOOLS)


@pytest.mark.parametrize("value", [None, 7, "list_tables", ["list_tables"], {}, {"args": {}}, {"tool": {1: 2}}])
def test_validate_call_takes_anything(value: object) -> None:
    assert isinstance(validate_call(value), BadCall)


# ---- one table: prompt and validation


def test_the_eight_tools() -> None:
    assert {name: [p.name for p in tool.params] for name, tool in TOOLS.items()} == {
        "list_tables": [],
        "describe_table": ["table_name"],
        "foreign_keys": ["table_name"],
        "join_path": ["table_a", "table_b"],
        "sample_rows": ["table_name", "limit"],
        "distinct_values": ["table_name", "column_name", "limit"],
        "run_query": ["sql"],
        "submit_sql": ["sql"],
    }


def test_prompt_lists_exactly_the_table() -> None:
    listed = re.findall(r"^- (\w+\(.*?\)): (.+)$", EXEC_PLAN_TOOL_INSTRUCTIONS, re.MULTILINE)
    assert listed == [(tool.signature, tool.doc) for tool in TOOLS.values()]


def test_prompt_is_generated_from_the_table() -> None:
    extra = Tool("explain", "the plan of a query", (Param("sql", "string"), Param("depth", "integer", default=3)))
    assert "- explain(sql, depth=3): the plan of a query" in instructions({**TOOLS, "explain": extra}).splitlines()


def test_prompt_is_short_plain_lines() -> None:
    lines = EXEC_PLAN_TOOL_INSTRUCTIONS.split("\n")
    assert len(lines) <= 40
    assert all(len(line) <= 100 and line == line.rstrip() and line.isascii() for line in lines)
    assert "<think>" in EXEC_PLAN_TOOL_INSTRUCTIONS
    assert '{"tool": "<name>", "args": {...}}' in lines


def test_prompt_and_its_hash_are_pinned() -> None:
    # A trained model expects this very text: changing it is a decision, made by changing the golden file.
    golden = (HERE / "prompt.txt").read_text()
    assert golden == EXEC_PLAN_TOOL_INSTRUCTIONS
    assert (HERE / "prompt.sha256").read_text().strip() == protocol.PROMPT_SHA256


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_validation_follows_the_table(tool: Tool) -> None:
    values = {p.name: "x" if p.type == "string" else 1 for p in tool.params}
    assert validate_call({"tool": tool.name, "args": values}) == Call(tool.name, values)
    required = {p.name: values[p.name] for p in tool.params if p.required}
    filled = validate_call({"tool": tool.name, "args": required})
    assert isinstance(filled, Call)
    assert list(filled.args) == [p.name for p in tool.params]
    for name in required:
        fewer = validate_call({"tool": tool.name, "args": {k: v for k, v in values.items() if k != name}})
        assert isinstance(fewer, BadCall)
        assert fewer.code == "missing_argument"
    more = validate_call({"tool": tool.name, "args": {**values, "another": 1}})
    assert isinstance(more, BadCall)
    assert more.code == "unknown_argument"
