"""What the upstream evaluators execute, reproduced: for checking parity, never for scoring a model.

`readonly` is the plain isolated execution that published scores of single statements were measured with:
a read-only connection that runs whatever SQLite lets it, statements included that our sandbox refuses
because they are no queries (BEGIN, temporary tables, settings).

BIRD's evaluator runs prediction, then gold, on one ordinary writable connection, so the prediction's
writes, temporary tables and pragmas reach the gold query. Spider 2's copies the database into memory and
runs the prediction there, writes included. All of it happens here on a throw-away copy, in a child process
that is killed at the time limit. Two things upstream would allow are refused, because a copy cannot
contain them: attaching another file (VACUUM INTO included), and more than `MEMORY_BYTES` of memory.
"""

import multiprocessing
import resource
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from eval.scorers.base import Scores, Verdict
from eval.scorers.bird import OFFICIAL, SOFT_F1, STRICT, score_results
from shared.sql.sandbox import QueryResult

MEMORY_BYTES = 4 << 30
Kind = Literal["bird", "spider2", "readonly"]
Reply = tuple[str, Any]


class UpstreamRunner:
    """One killable child that executes model SQL as the upstream programs do. A context manager."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._start()

    def _start(self) -> None:
        self._pipe, child_end = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(child_end,), daemon=True)
        self._process.start()
        child_end.close()
        self._pipe.recv()  # ready: start-up is not charged to the first query

    def bird(self, database: Path, pred_sql: str, gold_sql: str, seconds: float) -> Scores:
        """Official, strict and soft F1 of the pair on one shared connection; `seconds` bounds the pair."""
        status, payload = self._ask("bird", database, (pred_sql, gold_sql), seconds)
        if status != "ok":
            failed = [Verdict(rule, 0.0, f"{status}: {payload}") for rule in (OFFICIAL, STRICT, SOFT_F1)]
            return Scores(failed[0], failed[1], failed[2], status)
        pred, gold = (_result((), rows) for rows in payload)
        return score_results(pred, gold, undecodable="fail")

    def spider2(self, database: Path, pred_sql: str, seconds: float) -> QueryResult:
        """The prediction's result on an in-memory copy. Upstream has no time limit; a harness needs one."""
        return self._single("spider2", database, pred_sql, seconds)

    def readonly(self, database: Path, sql: str, seconds: float) -> QueryResult:
        """One statement on a read-only connection of its own."""
        return self._single("readonly", database, sql, seconds)

    def _single(self, kind: Kind, database: Path, sql: str, seconds: float) -> QueryResult:
        status, payload = self._ask(kind, database, (sql,), seconds)
        if status != "ok":
            return QueryResult("timeout" if status == "timeout" else "sql_error", (), [], payload, False, seconds, ())
        return _result(*payload)

    def _ask(self, kind: Kind, database: Path, statements: tuple[str, ...], seconds: float) -> Reply:
        with tempfile.TemporaryDirectory(prefix="execplan-parity-") as folder:
            copy = Path(folder) / "database.sqlite"
            shutil.copyfile(database, copy)
            self._pipe.send((kind, str(copy), statements))
            try:
                if self._pipe.poll(seconds):
                    reply: Reply = self._pipe.recv()
                    return reply
                status: Reply = ("timeout", f"killed after {seconds:g} s")
            except EOFError:
                status = ("error", "the process died (out of memory?)")
            self._stop()
            self._start()
            return status

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def close(self) -> None:
        """Kill the child."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _result(columns: tuple[str, ...], rows: list[tuple[Any, ...]]) -> QueryResult:
    return QueryResult("ok", columns, rows, "", False, 0.0, ())


def _serve(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    pipe.send("ready")
    while True:
        try:
            kind, path, statements = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", _RUN[kind](path, *statements)))
        except Exception as error:  # whatever the model's SQL provoked is the upstream score of 0
            pipe.send(("error", f"{type(error).__name__}: {error}"))


def _refuse_attach(action: int, name: str | None, *_: str | None) -> int:
    return (
        sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_ATTACH and name not in ("", ":memory:") else sqlite3.SQLITE_OK
    )


def _run_pair(path: str, pred_sql: str, gold_sql: str) -> tuple[list[Any], list[Any]]:
    connection = sqlite3.connect(path)
    try:
        connection.set_authorizer(_refuse_attach)
        cursor = connection.cursor()
        cursor.execute(pred_sql)
        pred = cursor.fetchall()
        cursor.execute(gold_sql)
        return pred, cursor.fetchall()
    finally:
        connection.close()


def _run_in_memory(path: str, sql: str) -> tuple[tuple[str, ...], list[Any]]:
    source, connection = sqlite3.connect(path), sqlite3.connect(":memory:")
    try:
        source.backup(connection)
        return _run_alone(connection, sql)
    finally:
        source.close()
        connection.close()


def _run_readonly(path: str, sql: str) -> tuple[tuple[str, ...], list[Any]]:
    connection = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)
    try:
        return _run_alone(connection, sql)
    finally:
        connection.close()


def _run_alone(connection: sqlite3.Connection, sql: str) -> tuple[tuple[str, ...], list[Any]]:
    connection.set_authorizer(_refuse_attach)
    cursor = connection.cursor()
    cursor.execute(sql)
    rows = cursor.fetchall()
    return tuple(column[0] for column in cursor.description or ()), rows


_RUN: dict[Kind, Callable[..., Any]] = {"bird": _run_pair, "spider2": _run_in_memory, "readonly": _run_readonly}
