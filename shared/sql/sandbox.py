"""Run SQL that nobody vouches for: a pool of worker processes that can only read, and that can be killed.

    with Sandbox(workers=2) as sandbox:
        result = sandbox.query(database, "SELECT name FROM singer", Limits(seconds=5))

This is the only way to SQLite for SQL that a model or a benchmark wrote, for the tools and for the
scorers alike. What it guarantees, by which mechanism, and what it doesn't: docs/sandbox.md.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

from shared.database import Database
from shared.errors import SetupError
from shared.sql.cells import BadText
from shared.sql.process import WorkerDied, WorkerProcess, WorkerTimeout

__all__ = ["BadText", "Limits", "Outcome", "QueryResult", "Sandbox"]

Outcome = Literal["ok", "refused", "sql_error", "timeout", "limit", "setup_error"]
_OUTCOMES = ("ok", "refused", "sql_error", "timeout", "limit", "setup_error")
_log = logging.getLogger(__name__)
_BUILD_SECONDS = 60.0
SCHEMA_SECONDS = 30.0
_BUILD_MEMORY = 1 << 30
_SCHEMA_BYTES = 256 << 20
_MAX_CRASHES = 5
_BAD_START_SECONDS = 30.0
_MAX_NOTES = 4096
# Statements that share a message to a worker, the time they get together, and what is light enough to go on with it.
_BATCH, _BATCH_SECONDS, _LIGHT_SECONDS = 64, 0.1, 0.005
_UNMATCHED = "\"{0}\" matches no column: it was read as the text '{0}'"


@dataclass(frozen=True)
class Limits:
    """Bounds of one query.

    seconds:      wall time, lock waits included; the answer is there within seconds + 1.
    max_rows:     rows fetched; when there are more, the result is `truncated` (None: no bound).
    max_bytes:    size of all fetched cells as encoded for transport; beyond it the outcome is "limit".
    memory_bytes: memory the query may take in the worker; beyond it the outcome is "limit".
    max_length:   bytes of a single string, BLOB or row; beyond it the outcome is "limit".
    """

    seconds: float = 30.0
    max_rows: int | None = None
    max_bytes: int = 64 << 20
    memory_bytes: int = 1 << 30
    max_length: int = 64 << 20


_DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class QueryResult:
    """How a query ended, and its rows when the outcome is "ok" (else there are none).

    Cells are int, float (infinities included), str, bytes and None; TEXT that is not UTF-8 is a
    `BadText`. `message` says what went wrong. `truncated`: there were more than `max_rows` rows.
    `unmatched`: names in double quotes that match no column, which SQLite read as strings (only when
    asked for). `notes`: the same as sentences. `seconds`: wall time in the worker.
    """

    outcome: Outcome
    columns: tuple[str, ...] = ()
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    message: str = ""
    truncated: bool = False
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()


class Sandbox:
    """A pool of at most `workers` worker processes, started when first needed; a context manager; thread-safe.

    Calls from any number of threads share the workers: a call waits for a free one (that wait is not
    charged to its limit). A worker that dies or must be killed is replaced, and a call it took down with
    it is run again in the time it has left: queries only read, so nobody notices.
    """

    def __init__(self, workers: int = 1, directory: Path = Path("/")) -> None:
        """`directory` is where a relative path in SQL would lead, were one ever followed."""
        if workers < 1:
            raise SetupError(f"a sandbox needs at least 1 worker, not {workers}")
        self.workers = workers
        self._directory = directory
        self._changed = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self._started = 0
        self._closed = False
        self._pid = os.getpid()
        self._notes: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; a call still running elsewhere gets its answer first. Closing twice is fine."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self._started -= len(idle)
            self._changed.notify_all()
        for worker in idle:
            worker.kill()

    def abort(self) -> None:
        """Close at once, for a program that was told to stop: calls under way lose their worker (RuntimeError)."""
        with self._changed:
            self._closed = True
            for worker in self._busy:
                worker.stop()
        self.close()

    def query(
        self,
        database: Database,
        sql: str,
        limits: Limits = _DEFAULT_LIMITS,
        *,
        check_names: bool = False,
        reverse_unordered: bool = False,
    ) -> QueryResult:
        """Run one statement and wait for its result. Nothing that `sql` says makes this raise.

        `check_names` finds double-quoted names that SQLite read as strings (`QueryResult.unmatched`);
        the result is the same either way. `reverse_unordered` runs the statement under PRAGMA
        reverse_unordered_selects: a result that differs then depends on an order the SQL leaves open.
        A database that cannot be read gives the outcome "setup_error". SetupError only when no worker
        can be started; RuntimeError after `close`.
        """
        request = {"op": "query", "sql": sql, **_bounds(limits), "names": check_names, "reverse": reverse_unordered}
        answer = self._ask(database, request, limits.seconds, limits.memory_bytes, limits.max_bytes)
        try:
            return _to_result(answer)
        except (KeyError, TypeError, ValueError):  # nothing our worker sends; but then it runs C code on untrusted SQL
            return QueryResult("setup_error", message=f"database {database.db_id}: the SQL process answered nonsense")

    def query_many(
        self,
        database: Database,
        statements: Sequence[str],
        limits: Limits = _DEFAULT_LIMITS,
        *,
        reverse_unordered: bool = False,
    ) -> list[QueryResult]:
        """The results that `query` gives for each statement under these limits, in order.

        Light statements share a message to a worker, so that each costs a fraction of a call; what takes long
        or ends badly there is run again by itself.
        """
        results: list[QueryResult] = []
        together = True
        while len(results) < len(statements):
            batch = statements[len(results) : len(results) + _BATCH]
            found = self._batch(database, batch, limits, reverse_unordered) if together and len(batch) > 1 else []
            results += found
            if len(found) < len(batch):
                sql = statements[len(results)]
                alone = self.query(database, sql, limits, reverse_unordered=reverse_unordered)
                results.append(alone)
                together = alone.seconds < _LIGHT_SECONDS
        return results

    def _batch(self, database: Database, statements: Sequence[str], limits: Limits, reverse: bool) -> list[QueryResult]:
        """The results of the first few statements: as many as were light, and ended well or failed for certain."""
        bounds = _bounds(limits) | {"names": False, "reverse": reverse}
        request = {"op": "batch", "statements": list(statements), **bounds}
        seconds = min(_BATCH_SECONDS, limits.seconds)
        answer = self._ask(database, request, seconds, limits.memory_bytes, limits.max_bytes)
        try:
            return [_to_result(one) for one in answer["answers"]] if answer["outcome"] == "ok" else []
        except (KeyError, TypeError, ValueError):
            return []

    def schema(self, database: Database, seconds: float = SCHEMA_SECONDS) -> list[dict[str, Any]]:
        """The schema as plain data, see `shared.sql.introspect.read_schema`.

        TimeoutError when it takes longer than `seconds` (another process may hold a lock), SetupError
        when it can't be read at all.
        """
        answer = self._ask(database, {"op": "schema"}, seconds, _BUILD_MEMORY, _SCHEMA_BYTES)
        if answer["outcome"] == "timeout":
            raise TimeoutError(answer["message"])
        if answer["outcome"] != "ok":
            raise SetupError(answer["message"])
        schema: list[dict[str, Any]] = answer["schema"]
        return schema

    def build_notes(self, database: Database) -> tuple[str, ...]:
        """What building a payload had to skip or clamp; () for a file. SetupError when it can't be built."""
        if database.payload is None:
            return ()
        if database.content_hash not in self._notes:
            self.schema(database)
        return self._notes.get(database.content_hash, ())

    def _ask(
        self, database: Database, request: dict[str, Any], seconds: float, memory: int, max_bytes: int
    ) -> dict[str, Any]:
        """One request within `seconds`, on as many workers as it takes (a few); the answer has an outcome."""
        name, reference = _reference(database)
        if reference is None:
            return _failed("setup_error", f"{name}: the path holds a NUL character")
        request |= {"db": reference, "memory": memory}
        left, crashes, first_start = seconds, 0, time.monotonic()
        while crashes < _MAX_CRASHES:
            worker = self._acquire(reference["key"])
            started = time.monotonic()
            try:
                answer = self._ask_worker(worker, database, request | {"seconds": left}, max_bytes)
            except WorkerTimeout:
                return _failed("timeout", "the query took too long", time.monotonic() - started)
            except WorkerDied as error:
                if not error.during_start:
                    crashes += 1
                    left = max(left - (time.monotonic() - started), 0.01)
                elif time.monotonic() - first_start > _BAD_START_SECONDS:
                    raise SetupError("every SQL worker is killed while it starts; is there enough memory?") from error
                continue
            finally:
                self._release(worker)
            if answer.get("outcome") not in _OUTCOMES:
                return _failed("setup_error", f"{name}: the SQL process gave no sensible answer")
            if answer["outcome"] == "setup_error":
                answer["message"] = f"{name}: {answer['message']}"
            return answer
        return _failed("limit", "the query made the SQL process crash", seconds - left)

    def _ask_worker(
        self, worker: WorkerProcess, database: Database, request: dict[str, Any], max_bytes: int
    ) -> dict[str, Any]:
        answer = worker.ask(request, request["seconds"], max_bytes)
        if not answer.get("need"):
            return answer
        assert database.payload is not None
        build = {
            "op": "build",
            "db": request["db"],
            "full_schema": database.payload.full_schema,
            "schema_content": database.payload.schema_content,
            "memory": _BUILD_MEMORY,
            "seconds": _BUILD_SECONDS,
        }
        built = worker.ask(build, _BUILD_SECONDS, max_bytes)
        if built.get("outcome") == "ok":
            notes = tuple(map(str, built["notes"]))
            for note in notes:
                _log.info("database %s: %s", database.db_id, note)
            with self._changed:
                self._notes[database.content_hash] = notes
                if len(self._notes) > _MAX_NOTES:
                    self._notes.popitem(last=False)
            return worker.ask(request, request["seconds"], max_bytes)
        why = "needs too much time or memory" if built["outcome"] != "setup_error" else built["message"]
        return _failed("setup_error", f"its payload cannot be built: {why}")

    def _acquire(self, key: str) -> WorkerProcess:
        """A worker for one call, if possible one that has the database open already."""
        with self._changed:
            if self._pid != os.getpid():  # forked: the workers and their sockets belong to the other process
                for worker in self._idle:
                    worker.abandon()
                self._reset()
            while True:
                if self._closed:
                    raise RuntimeError("the sandbox is closed")
                while self._idle:
                    at = next((i for i, w in enumerate(self._idle) if w.last_key == key), -1)
                    worker = self._idle.pop(at)
                    if worker.alive():
                        worker.last_key = key
                        self._busy.add(worker)
                        return worker
                    worker.kill()
                    self._started -= 1
                    self._changed.notify()
                if self._started < self.workers:
                    self._started += 1
                    break
                self._changed.wait()
        try:
            worker = WorkerProcess(key, self._directory)
        except BaseException:
            with self._changed:
                self._started -= 1
                self._changed.notify()
            raise
        self._lend(worker)
        return worker

    def _lend(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._busy.add(worker)
            if self._closed:  # aborted while it started
                worker.stop()

    def _release(self, worker: WorkerProcess) -> None:
        with self._changed:
            self._busy.discard(worker)
            kept = not (worker.gone or self._closed or self._pid != os.getpid())
            if kept:
                self._idle.append(worker)
            else:
                self._started -= 1
            self._changed.notify()
        if not kept:
            worker.kill()


def _bounds(limits: Limits) -> dict[str, Any]:
    return {"max_rows": limits.max_rows, "max_bytes": limits.max_bytes, "max_length": limits.max_length}


def _to_result(answer: dict[str, Any]) -> QueryResult:
    if answer["outcome"] != "ok":
        return QueryResult(answer["outcome"], message=str(answer["message"]), seconds=float(answer["seconds"]))
    unmatched = tuple(answer["unmatched"])
    return QueryResult(
        "ok",
        columns=tuple(answer["columns"]),
        rows=list(map(tuple, answer["rows"])),
        truncated=bool(answer["truncated"]),
        seconds=float(answer["seconds"]),
        notes=tuple(_UNMATCHED.format(name) for name in unmatched),
        unmatched=unmatched,
    )


def _failed(outcome: Outcome, message: str, seconds: float = 0.0) -> dict[str, Any]:
    return {"outcome": outcome, "message": message, "seconds": seconds}


def _reference(database: Database) -> tuple[str, dict[str, Any] | None]:
    """How messages name a database, and how a worker finds it (None: no file can have this path).

    The path is percent-encoded, so that no character in it is read as part of the URI.
    """
    if database.path is None:
        return f"database {database.db_id}", {"key": database.content_hash, "path": None, "uri": None}
    path = os.path.abspath(database.path)
    name = f"database {database.db_id} ({path})"
    if "\0" in path:
        return name, None
    return name, {"key": path, "path": path, "uri": "file://" + quote(os.fsencode(path))}
