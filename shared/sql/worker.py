"""The process that runs SQL: `Sandbox` starts it, sends one request at a time, and kills it when it must.

It reads length-prefixed JSON messages on descriptor 0 and answers on the same socket; end of file ends
it. It imports little, on purpose: it starts in tens of milliseconds, and what is not there can't be misused.

Requests (key "op"; each with db, seconds, memory):
    query   sql, max_rows, max_bytes, max_length, names, reverse -> outcome, columns, rows, truncated, unmatched
    batch   statements, and the rest of a query -> outcome, answers: those of a query, for the first few statements
    schema  -> outcome, schema (see `introspect`)
    build   full_schema, schema_content -> outcome, notes
Every answer has seconds; one that failed has outcome and message. `db` is {"key", "path", "uri"}; path and
uri are null for a payload. A payload that the worker doesn't hold is answered with {"need": true}: the
parent sends it (build) and asks again.
"""

import os
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shared.sql import limits
from shared.sql.cells import decode, encode
from shared.sql.introspect import read_schema
from shared.sql.opening import CannotOpen, Databases, NeedPayload, Opened
from shared.sql.running import Failed, classify, failure, is_bad_text, is_locked, named_errors, run_query

HEADER = struct.Struct("<Q")
# What a program that is one file, like an export's agent.py, is started with to be a worker.
WORKER_FLAG = "--sql-worker"
# The worker ends the statement at its deadline; the kernel ends the worker this much later.
KERNEL_GRACE = 0.35
_PROGRESS_STEPS = 2000
_LOCK_PAUSE = 0.005
_SCHEMA_LENGTH = 64 << 20
_FIRST_READ = 1 << 16
_LONG_CALL = 0.005


class Worker:
    """The request loop, its open databases, and the deadline of the call at hand."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._deadline = float("inf")
        self._databases = Databases(self._expired, _PROGRESS_STEPS)
        self._operations: dict[str, Callable[[dict[str, Any], float], bytes]] = {
            "query": self._query,
            "batch": self._batch,
            "schema": self._schema,
            "build": self._build,
        }

    def _expired(self) -> bool:
        return time.monotonic() > self._deadline

    def serve(self) -> None:
        """Answer requests until the parent closes its end, or one took so much memory that a fresh start is due."""
        while (request := self._receive()) is not None:
            started, seconds, healthy = time.monotonic(), float(request["seconds"]), True
            self._deadline = started + seconds
            limits.die_after(seconds + KERNEL_GRACE)
            limits.allow_memory(int(request["memory"]) + self._databases.held_bytes())
            limits.allow_file_writes(False)
            try:
                answer = self._operations[request["op"]](request, started)
            except NeedPayload:
                answer = encode({"need": True})
            except CannotOpen as error:
                answer = failure("setup_error", str(error), started)
            except Failed as error:
                answer = failure(error.outcome, error.message, started)
            except sqlite3.Error as error:
                answer = failure("setup_error", classify(error).message, started)
            except MemoryError:
                healthy = False
                answer = failure("limit", "the query needs more memory than is allowed", started)
            limits.die_after(0)
            self._deadline = float("inf")
            self._send(answer)
            if not healthy:
                return
            # What took no time took no memory either.
            if time.monotonic() - started > _LONG_CALL and limits.has_outgrown(self._databases.held_bytes()):
                return

    def _retrying(self, request: dict[str, Any], work: Callable[[Opened], bytes]) -> bytes:
        """Do `work` on the request's database; wait for locks until the deadline, and bear with bad text."""
        database, lenient = request["db"], False
        while True:
            try:
                with self._databases.connection(database["key"], database["path"], database["uri"]) as opened:
                    if lenient:
                        opened.accept_bad_text()
                    with named_errors(opened):
                        return work(opened)
            except sqlite3.Error as error:
                if is_bad_text(error) and not lenient:
                    lenient = True
                elif not is_locked(error):
                    raise
                elif self._expired():
                    raise Failed("timeout", "the database stayed locked by another process") from error
                else:
                    time.sleep(_LOCK_PAUSE)

    def _query(self, request: dict[str, Any], started: float) -> bytes:
        def work(opened: Opened) -> bytes:
            opened.allow_length(int(request["max_length"]))
            if request["reverse"]:
                opened.reverse_unordered()
            return run_query(
                opened,
                request["sql"],
                max_rows=request["max_rows"],
                max_bytes=int(request["max_bytes"]),
                names=bool(request["names"]),
                expired=self._expired,
                started=started,
            )

        return self._retrying(request, work)

    def _batch(self, request: dict[str, Any], started: float) -> bytes:
        """Statements in order, until one would end otherwise if it were alone: the rest is left to the parent."""
        answers: list[bytes] = []
        bytes_left = int(request["max_bytes"])
        for sql in request["statements"]:
            began = time.monotonic()
            try:
                answer = self._query({**request, "sql": sql, "max_bytes": bytes_left}, began)
            except Failed as error:
                if error.outcome not in ("sql_error", "refused"):
                    break
                answer = failure(error.outcome, error.message, began)
            answers.append(answer)
            bytes_left -= len(answer)
            if bytes_left <= 0 or self._expired():
                break
        return b'{"outcome":"ok","answers":[' + b",".join(answers) + b"]}"

    def _schema(self, request: dict[str, Any], started: float) -> bytes:
        def work(opened: Opened) -> bytes:
            opened.accept_bad_text()
            opened.allow_length(_SCHEMA_LENGTH)
            schema = read_schema(opened.connection)
            return encode({"outcome": "ok", "schema": schema, "seconds": time.monotonic() - started})

        return self._retrying(request, work)

    def _build(self, request: dict[str, Any], started: float) -> bytes:
        key, texts = request["db"]["key"], (request["full_schema"], request["schema_content"])
        notes = self._databases.build(key, *texts, self._expired)
        return encode({"outcome": "ok", "notes": notes, "seconds": time.monotonic() - started})

    def _receive(self) -> dict[str, Any] | None:
        """The next request, None at the end. The parent waits for each answer, so nothing follows a request."""
        data = bytearray(os.read(self._descriptor, _FIRST_READ))
        wanted = HEADER.size
        while len(data) < wanted or wanted == HEADER.size:
            if len(data) >= HEADER.size:
                wanted = HEADER.size + HEADER.unpack_from(data)[0]
            if len(data) >= wanted:
                break
            part = os.read(self._descriptor, 1 << 20)
            if not part:
                return None
            data += part
        request: dict[str, Any] = decode(memoryview(data)[HEADER.size :])
        return request

    def _send(self, body: bytes) -> None:
        view = memoryview(HEADER.pack(len(body)) + body)
        while view:
            view = view[os.write(self._descriptor, view) :]


def main() -> None:
    """Confine this process, say that it is ready, and serve descriptor 0."""
    limits.confine()
    os.write(0, b"R")
    with suppress(BrokenPipeError, ConnectionResetError):
        Worker(0).serve()


if __name__ == "__main__":
    main()
