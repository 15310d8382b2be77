"""An episode on a terminal, turn by turn. What models and databases wrote is text: no markup, no control codes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from shared.sql.sandbox import QueryResult
from shared.text import plain

_MAX_LINES = 24
_CELL_CHARACTERS = 80
_INDENT = (0, 0, 0, 3)


def show_question(console: Console, question: str, evidence: str, where: str) -> None:
    """The head of an episode."""
    body = Text(plain(question), style="bold")
    if evidence:
        body.append(f"\n{plain(evidence)}", style="not bold")
    console.print(Panel(body, title=Text(plain(where)), title_align="left", border_style="dim"))


def show_turn(console: Console, view: Mapping[str, Any], number: int, seconds: float) -> None:
    """One turn, as `eval.trace.turn_view` gives it."""
    head = f"turn {number}: {view['tokens']:,} tokens, {seconds:.1f} s"
    flags = [
        "closing turn" if view["closing"] else "",
        "" if view["clean"] or view["closing"] else "not clean",
        "cut by a token limit" if view["cut"] else "",
        f"{view['dropped']} calls not run" if view["dropped"] else "",
    ]
    console.print(Rule(style="dim"))
    console.print(Text(", ".join([head, *filter(None, flags)]), style="dim"))
    if view["think"] and view["think"].strip():
        _print_text(console, view["think"].strip(), "italic dim")
    if view["raw"] is not None and not view["calls"]:
        _print_text(console, view["raw"].rpartition("</think>")[2].strip() or "(nothing)", "")
    for call in view["calls"]:
        _show_call(console, call)
    for said, style in ((view["problem"], "yellow"), (view["budget"], "dim"), (view["request"], "yellow")):
        if said:
            _print_text(console, said, style)


def _show_call(console: Console, call: Mapping[str, Any]) -> None:
    args = dict(call["args"])
    sql = args.pop("sql", None)
    shown = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in args.items())
    head = Text("▸ ", style="cyan").append(plain(call["tool"] or "unknown tool"), style="bold cyan")
    head.append(f"({plain(shown)})" if sql is None else "")
    if call["outcome"] not in ("ok", "submitted"):
        head.append(f"  {call['outcome']}", style="bold red")
    console.print(head)
    if sql is not None:
        console.print(Padding(sql_text(sql), _INDENT))
    if call["outcome"] != "submitted":
        _print_text(console, call["text"], "" if call["outcome"] == "ok" else "red")


def _print_text(console: Console, text: str, style: str) -> None:
    lines = plain(text).split("\n")
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES - 1], f"… {len(lines) - _MAX_LINES + 1} more lines"]
    console.print(Padding(Text("\n".join(lines), style=style), _INDENT))


def sql_text(sql: str) -> Syntax:
    """A query with its words told apart."""
    return Syntax(plain(sql), "sql", theme="ansi_dark", background_color="default", word_wrap=True)


def show_answer(console: Console, sql: str | None, origin: str, ended: str) -> None:
    """The answer, or that there is none."""
    if sql is None:
        console.print(Panel(Text(f"no answer: the episode ended as {ended}", style="bold red"), border_style="red"))
        return
    title = Text(f"answer ({origin.replace('_', ' ')})")
    console.print(Panel(sql_text(sql), title=title, title_align="left", border_style="green"))


def show_rows(console: Console, result: QueryResult) -> None:
    """What a query returned: a table, or why there is none."""
    if result.outcome != "ok":
        console.print(Text(f"{result.outcome}: {plain(result.message)}", style="bold red"))
        return
    table = Table(header_style="bold", border_style="dim")
    for name in result.columns:
        table.add_column(Text(_cell(name)), overflow="fold")
    for row in result.rows:
        table.add_row(*(Text("NULL", style="dim italic") if cell is None else Text(_cell(cell)) for cell in row))
    console.print(table)
    count = len(result.rows)
    rows = f"{count:,} row{'' if count == 1 else 's'}"
    console.print(Text(f"the first {rows}; there are more" if result.truncated else rows, style="dim"))


def _cell(value: Any) -> str:
    text = f"x'{value.hex()}'" if isinstance(value, bytes) else str(value)
    text = plain(text).replace("\n", "␊").replace("\t", "␉")
    return text if len(text) <= _CELL_CHARACTERS else text[: _CELL_CHARACTERS - 1] + "…"


def show_verdict(console: Console, verdicts: Sequence[tuple[str, bool]]) -> None:
    """Yes or no to each sentence about the answer and the gold query."""
    for sentence, holds in verdicts:
        mark, style = ("✓", "green") if holds else ("✗", "red")
        console.print(Text(f"{mark} {sentence}", style=style))
