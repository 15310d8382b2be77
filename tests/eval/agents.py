"""A scripted agent that fails in every way there is, for tests of what reads runs."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from eval import run
from eval.config import parse_arguments
from eval.engines import Prepared
from shared.chat import ByteCodec
from shared.engines.base import Request
from shared.engines.scripted import ScriptedEngine, call_text

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!--<script> & &amp; \u2028\u2029 \x1b[31mred\x1b[0m \u202egnp.exe {{7*7}} ${7*7} '\"`"
)
KINDS = (
    "right", "right", "right", "right", "right", "right", "reordered", "repeated", "fewer", "number", "elsewhere",
    "surplus_column", "unknown", "syntax", "refused", "silent", "endless_think", "final_text", "fallback", "hostile",
)  # fmt: skip


def kind_of(question_id: str, salt: str = "") -> str:
    """How the agent behaves on a question: the same in every run with this salt."""
    return random.Random(f"{salt}/{question_id}").choice(KINDS)


def mixed_turn(request: Request, salt: str = "") -> str:
    """The agent's next turn."""
    example, turn, closing = (request.context[key] for key in ("example", "turn", "closing"))
    kind, gold = kind_of(example.question_id, salt), example.gold_sql.rstrip("; \n")
    if closing:
        return _closing(kind, gold)
    if turn == 0:
        return call_text(f"Goal: {example.question}\nKnown: nothing yet.\nNext: list the tables.", "list_tables")
    if kind in ("silent", "final_text"):
        return "I would rather think about it.\n</think>\n\nLet me see what this could be. It is a hard question."
    if kind == "endless_think":
        return "<think>\n" + "The table might be this one, or it might be that one. " * 40
    if kind == "fallback" and turn > 1:
        return call_text("That column must be somewhere.", "run_query", sql="SELECT nowhere FROM nothing_at_all")
    if turn == 1:
        tables = [t.strip('"`[]') for t in _words_after(gold, ("from", "join"))][:4] or ["nothing"]
        calls = [call_text("", "describe_table", table_name=t).partition("</think>\n\n")[2] for t in tables]
        calls.append(call_text("", "sample_rows", table_name=tables[0], limit=3).partition("</think>\n\n")[2])
        if kind == "hostile":
            calls.append(call_text("", "describe_table", table_name=HOSTILE).partition("</think>\n\n")[2])
        plan = HOSTILE if kind == "hostile" else f"Goal: as asked.\nMissing: the columns of {', '.join(tables)}."
        return f"<think>\n{plan}\n</think>\n\n" + "\n".join(calls)
    if turn == 2:
        return call_text("Try the query before submitting it.", "run_query", sql=_answer(kind, gold))
    return call_text("The rows look right.", "submit_sql", sql=_answer(kind, gold))


def _answer(kind: str, gold: str) -> str:
    return {
        "reordered": f"SELECT * FROM ({gold}) ORDER BY 1 DESC",
        "repeated": f"SELECT * FROM ({gold}) UNION ALL SELECT * FROM ({gold})",
        "fewer": f"SELECT * FROM ({gold}) LIMIT 1",
        "number": "SELECT 42",
        "elsewhere": "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE '%nope%'",
        "surplus_column": f"SELECT *, 1 AS one FROM ({gold})",
        "unknown": gold.replace("SELECT", "SELECT no_such_column,", 1),
        "syntax": gold.replace("FROM", "FORM", 1),
        "refused": "DELETE FROM sqlite_master",
        "hostile": f"SELECT '{HOSTILE.replace(chr(39), chr(39) * 2)}' AS \"<b>column</b>\"",
    }.get(kind, gold)


def _closing(kind: str, gold: str) -> str:
    if kind == "final_text":
        return f"<think>\nNow it has to be said.\n</think>\n\n```sql\n{gold}\n```"
    return "" if kind == "fallback" else "<think>\nI do not know"


def _words_after(sql: str, markers: Sequence[str]) -> list[str]:
    words = sql.replace("(", " ").replace(")", " ").replace(",", " ").split()
    return list(dict.fromkeys(b for a, b in pairwise(words) if a.lower() in markers))


def evaluate_mixed(
    monkeypatch: pytest.MonkeyPatch, argv: Sequence[str], salt: str = "", script: Callable[..., str] = mixed_turn
) -> dict[str, Any]:
    """`eval.run` with the agent in the place of the engine that `argv` names."""
    codec = ByteCodec()
    engine = Prepared(codec, f"mixed {salt}", lambda: ScriptedEngine(codec, lambda r: script(r, salt), f"mixed {salt}"))
    with monkeypatch.context() as patch:
        patch.setattr(run, "prepare_engine", lambda config: engine)
        return run.evaluate(parse_arguments(argv))
