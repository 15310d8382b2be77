"""Ask one question and watch the episode: `python -m eval.ask --model DIR --db FILE "How many singers are there?"`.

The same episode as in an evaluation (prompt, tools, budgets, closing turn), shown turn by turn as it happens. Without
a question, questions are read from the terminal, one a line, and the model is loaded once.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eval.config import EvalConfig, add_engine_options, add_episode_options
from eval.engines import Prepared, prepare_engine
from eval.terminal import show_answer, show_question, show_rows, show_turn, show_verdict
from eval.trace import last_good, turn_view
from shared.cli import ArgumentParser, run_main
from shared.config import build_config
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Completion, Engine, Request
from shared.episode import Episode, EpisodeRecord
from shared.errors import SetupError
from shared.sql.results import official_equal, strict_equal
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.executor import ToolExecutor


@dataclass(frozen=True)
class Ask:
    """What to ask, of what, with which engine. Without a `question`, questions come from standard input."""

    config: EvalConfig
    db: Path
    question: str | None
    evidence: str
    gold: str
    rows: int
    json: bool


OnTurn = Callable[[dict[str, Any], int, float], None]


def parse_arguments(argv: Sequence[str] | None = None) -> Ask:
    """The command line. SetupError for what is missing or contradicts itself."""
    parser = ArgumentParser(
        prog="python -m eval.ask",
        description="Ask a question of a SQLite database and watch the episode.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "question", nargs="?", default=None, help="the question; without it, one a line from the terminal"
    )
    parser.add_argument("--db", type=Path, required=True, metavar="FILE", help="SQLite database; it is only read")
    parser.add_argument("--evidence", default="", help="a hint that goes with the question, as BIRD has them")
    parser.add_argument("--gold", default="", metavar="SQL", help="hold the answer against this query")
    parser.add_argument("--rows", type=int, default=20, help="rows of the answer that are shown (default 20)")
    parser.add_argument("--json", action="store_true", default=False, help="print the episode as one JSON line instead")
    add_engine_options(parser.add_argument_group("engine, as in eval.run; --engine gold submits --gold"))
    add_episode_options(parser.add_argument_group("mode, sampling and budgets, as in eval.run"))
    given = vars(parser.parse_args(argv))
    own = {key: given.pop(key) for key in ("question", "db", "evidence", "gold", "rows", "json")}
    if "base_url" in given:
        given.setdefault("engine", "openai")
    config = build_config(given, EvalConfig, "command line")
    if config.engine == "gold" and not own["gold"]:
        raise SetupError("--engine gold submits the gold query: give it with --gold")
    if own["rows"] < 1:
        raise SetupError(f"--rows {own['rows']}: show at least 1 row")
    return Ask(config, **own)


def open_database(path: Path, sandbox: Sandbox) -> Database:
    """The database, once its schema could be read. SetupError otherwise."""
    if not path.is_file():
        raise SetupError(f"database {path} does not exist: give a SQLite file with --db")
    database = Database(path.stem, path=path)
    ToolExecutor(database, sandbox).ddl()
    return database


def run_episode(
    example: Example, engine: Engine, prepared: Prepared, config: EvalConfig, sandbox: Sandbox, on_turn: OnTurn
) -> EpisodeRecord:
    """One episode. After each turn, `on_turn` gets its view, its number (from 1) and the seconds that sampling took."""
    settings = prepared.episode(config)
    episode = Episode(example, ToolExecutor(example.database, sandbox), prepared.codec, settings, seed=config.seed)
    request = episode.next_request()
    last_good_sql: str | None = None
    while request is not None:
        started = time.monotonic()
        completion = _complete(engine, request)
        seconds = time.monotonic() - started
        episode.accept(completion)
        request = episode.next_request()
        if episode.turns:
            turn, number = asdict(episode.turns[-1]), len(episode.turns)
            last_good_sql = last_good(turn, last_good_sql)
            asked = bool(request.context["closing"]) if request is not None else None
            on_turn(turn_view(turn, number, settings.max_turns, asked, last_good_sql), number, seconds)
    engine.end_session(episode.name)
    return episode.record()


def _complete(engine: Engine, request: Request) -> Completion:
    engine.add(request)
    while True:
        for completion in engine.step():
            return completion


def questions(ask: Ask, console: Console) -> Iterator[str]:
    """The one question of the command line, or a line of input each, until an empty one."""
    if ask.question is not None:
        yield ask.question
        return
    prompt = "\nquestion> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = console.input(prompt, markup=False).strip()
        except EOFError:
            return
        if not line:
            return
        yield line


def answer(
    ask: Ask, question: str, database: Database, engine: Engine, prepared: Prepared, sandbox: Sandbox, console: Console
) -> bool:
    """Ask one question and show everything. True when the answer runs."""
    example = Example("ask", database.db_id, question, ask.gold, database, ask.evidence)
    if ask.json:
        record = run_episode(example, engine, prepared, ask.config, sandbox, lambda view, number, seconds: None)
        print(json.dumps(record.to_json(tokens=False)))
        return record.answer_sql is not None
    show_question(console, question, ask.evidence, str(ask.db))
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        waiting = progress.add_task("turn 1")

        def on_turn(view: dict[str, Any], number: int, seconds: float) -> None:
            show_turn(console, view, number, seconds)
            progress.reset(waiting, description=f"turn {number + 1}")

        record = run_episode(example, engine, prepared, ask.config, sandbox, on_turn)
    if record.error is not None:
        raise SetupError(f"a fault of the program ended the episode: {record.error.strip().splitlines()[-1]}")
    show_answer(console, record.answer_sql, record.origin, record.ended)
    if record.answer_sql is None:
        return False
    result = sandbox.query(database, record.answer_sql, Limits(seconds=ask.config.query_seconds, max_rows=ask.rows))
    show_rows(console, result)
    if ask.gold:
        _compare(ask, record.answer_sql, database, sandbox, console)
    return result.outcome == "ok"


def _compare(ask: Ask, sql: str, database: Database, sandbox: Sandbox, console: Console) -> None:
    limits = Limits(seconds=ask.config.query_seconds)
    pred, gold = sandbox.query(database, sql, limits), sandbox.query(database, ask.gold, limits)
    if gold.outcome != "ok":
        raise SetupError(f"the query of --gold fails ({gold.message}): mend it")
    ran = pred.outcome == "ok"
    show_verdict(
        console,
        [
            ("the same set of rows as gold", ran and official_equal(pred.rows, gold.rows)),
            ("the same list of rows as gold", ran and strict_equal(pred.rows, gold.rows)),
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 1 when an answer is missing or does not run."""
    ask = parse_arguments(argv)
    console = Console(highlight=False)
    with Sandbox(workers=1) as sandbox:
        database = open_database(ask.db, sandbox)
        prepared = prepare_engine(ask.config)
        with Console(stderr=True).status("loading the model"):
            engine = prepared.load()
        try:
            outcomes = [answer(ask, q, database, engine, prepared, sandbox, console) for q in questions(ask, console)]
        finally:
            engine.close()
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    run_main(main)
