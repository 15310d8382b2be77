"""The exec_plan protocol: the exact system prompt, and everything that belongs to it under one name.

The tool table lives in `table`, the parser in `parse` and `validate`, what the environment says in `render`;
users import all of it from here. This module and what it imports need nothing but the standard library.
"""

import hashlib
from collections.abc import Mapping

from shared.tools.parse import parse_final, parse_turn
from shared.tools.render import (
    ClosingReason,
    budget_line,
    closing_message,
    cut_text,
    first_user_message,
    problem_result,
    render_results,
)
from shared.tools.table import (
    SUBMIT,
    TOOLS,
    BadCall,
    BadCallCode,
    Call,
    Outcome,
    Param,
    ParsedTurn,
    Problem,
    Tool,
    ToolResult,
)
from shared.tools.validate import validate_call

__all__ = [
    "EXEC_PLAN_TOOL_INSTRUCTIONS",
    "PROMPT_SHA256",
    "SUBMIT",
    "TOOLS",
    "BadCall",
    "BadCallCode",
    "Call",
    "ClosingReason",
    "Outcome",
    "Param",
    "ParsedTurn",
    "Problem",
    "Tool",
    "ToolResult",
    "budget_line",
    "closing_message",
    "cut_text",
    "first_user_message",
    "instructions",
    "parse_final",
    "parse_turn",
    "problem_result",
    "render_results",
    "validate_call",
]


def instructions(tools: Mapping[str, Tool] = TOOLS) -> str:
    """The system prompt for a tool table. Short lines, none with white space at its end."""
    lines = [
        "You answer a question with one SQLite query.",
        "You explore the database with tools first.",
        "",
        "Every turn has two parts.",
        "1. <think> a short execution plan </think>",
        "2. A single JSON object and nothing else:",
        '{"tool": "<name>", "args": {...}}',
        "",
        "The execution plan says:",
        "- Goal: what the question asks for.",
        "- Known: the tables, columns and values seen so far.",
        "- Missing: what must still be looked up.",
        "- Next: the tool that finds it.",
        "",
        "Tools:",
        *(f"- {tool.signature}: {tool.doc}" for tool in tools.values()),
        "",
        "Rules:",
        "- Take names and values from tool results.",
        "- Quote odd names with double quotes, text with single quotes.",
        "- Only reading is allowed.",
        "- Try the query with run_query before you submit it.",
        "- Return exactly the columns that were asked for.",
        "- The number of tool turns is limited.",
        "- Each result says how many are left.",
        "- Call submit_sql when the query is right.",
    ]
    return "\n".join(lines)


EXEC_PLAN_TOOL_INSTRUCTIONS = instructions()
PROMPT_SHA256 = hashlib.sha256(EXEC_PLAN_TOOL_INSTRUCTIONS.encode("utf-8")).hexdigest()
