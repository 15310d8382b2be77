"""The parent's end of one worker process: start it, ask it, and end it for certain."""

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.errors import SetupError
from shared.sql.cells import decode, encode
from shared.sql.worker import HEADER, WORKER_FLAG

_ROOT = Path(__file__).resolve().parents[2]
_BOOT = "import sys; sys.path.append(sys.argv[1]); from shared.sql.worker import main; main()"
# Below a file there are no folders: then these modules stand in that file, which is a program of its own.
_PROGRAM = ("-c", _BOOT, str(_ROOT)) if _ROOT.is_dir() else (str(_ROOT), WORKER_FLAG)
# A worker gets what the dynamic loader may need, and none of the user's other settings or secrets.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TMPDIR", "TZ")
_START_SECONDS = 60.0
# After the kernel's own deadline (worker.KERNEL_GRACE) the parent waits this long before it kills.
_PARENT_GRACE = 0.6
# Once an answer has begun to arrive, only its transport is left, which may take this much longer.
_TRANSPORT_SECONDS = 0.3
_FIRST_RECEIVE = 1 << 16
_DYING_SECONDS, _KILLED_SECONDS = 0.05, 0.3
# JSON escapes at most sixfold; the rest is column names and framing.
_ESCAPES, _FRAME_BYTES = 6, 8 << 20


class WorkerDied(Exception):
    """The process ended without an answer, of its own accord or killed by someone else.

    `during_start`: before it had seen the request.
    """

    def __init__(self, message: str, *, during_start: bool = False) -> None:
        super().__init__(message)
        self.during_start = during_start


class WorkerTimeout(Exception):
    """The process did not answer in time and has been ended."""


class WorkerProcess:
    """One worker. Not thread-safe: `Sandbox` lends it to one call at a time."""

    def __init__(self, key: str, directory: Path) -> None:
        """Start the process in `directory` (it gets ready by itself). `key` names the database it is for."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", *_PROGRAM],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                process_group=0,  # Ctrl-C in a terminal is for the parent, which then closes the line
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            )
        except OSError as error:
            ours.close()
            raise SetupError(f"cannot start a SQL worker process: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._ready = False
        self._waits = 0.0
        self.last_key = key
        self.gone = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """False when the process has ended, whoever ended it."""
        return not self.gone and self._process.poll() is None

    def ask(self, request: dict[str, Any], seconds: float, max_bytes: int) -> dict[str, Any]:
        """Send a request that may take `seconds` and return the answer. After an exception the worker is gone."""
        if not self._ready:
            self._await_ready()
        try:
            deadline = time.monotonic() + seconds + _PARENT_GRACE
            self._bound_waits(seconds + _PARENT_GRACE)
            body = encode(request)
            self._socket.sendall(HEADER.pack(len(body)) + body)
            answer = decode(self._receive(deadline, _ESCAPES * max_bytes + _FRAME_BYTES))
            if not isinstance(answer, dict):
                raise ValueError("an answer that is not a message")
            return answer
        except (BlockingIOError, TimeoutError):
            self.kill()
            raise WorkerTimeout from None
        except (OSError, EOFError, ValueError, RecursionError) as error:
            if self.kill() == -signal.SIGALRM:
                raise WorkerTimeout from None
            raise WorkerDied(str(error)) from error
        except BaseException:  # Ctrl-C, say: an answer may still be under way, so the worker can't be used again
            self.kill()
            raise

    def _await_ready(self) -> None:
        self._bound_waits(_START_SECONDS)
        try:
            if self._socket.recv(1) == b"":
                raise EOFError
        except (OSError, EOFError) as error:
            code = self.kill()
            if code < 0:  # a signal from outside: another one may do better
                raise WorkerDied(f"signal {-code}", during_start=True) from error
            raise SetupError(
                f"a SQL worker did not start (exit status {code}); try: {sys.executable} -I -S -c 'import sqlite3'"
            ) from error
        self._ready = True

    def _bound_waits(self, seconds: float) -> None:
        """Have the kernel end each send and receive after `seconds` (then BlockingIOError).

        Python's own socket timeouts would poll before every operation, which doubles a short call's time.
        """
        if seconds != self._waits:
            timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
            self._waits = seconds

    def _receive(self, deadline: float, most: int) -> bytes | memoryview:
        """One message: with the header in the first piece, usually, and for small answers all of it."""
        data = self._socket.recv(_FIRST_RECEIVE)
        while len(data) < HEADER.size:
            if not data:
                raise EOFError
            data += self._receive_more(HEADER.size - len(data))
        size = HEADER.unpack_from(data)[0]
        if size > most:
            raise ValueError(f"an answer of {size} bytes")
        if len(data) >= HEADER.size + size:
            return memoryview(data)[HEADER.size : HEADER.size + size]
        whole = bytearray(size)
        got = len(data) - HEADER.size
        whole[:got] = data[HEADER.size :]
        view = memoryview(whole)
        while got < size:
            part = self._socket.recv_into(view[got:])
            if part == 0:
                raise EOFError
            got += part
            if time.monotonic() > deadline + _TRANSPORT_SECONDS:
                raise TimeoutError
        return view

    def _receive_more(self, size: int) -> bytes:
        data = self._socket.recv(size)
        if not data:
            raise EOFError
        return data

    def stop(self) -> None:
        """Kill the process while another thread waits for its answer: that one finds the line closed and reaps."""
        if not self.gone:
            self._process.kill()

    def kill(self) -> int:
        """End the process, reap it, free its descriptors, and return its exit status (negative: a signal)."""
        self.gone = True
        self._socket.close()
        # It may be dying already (its own deadline, a crash): then its own exit status tells more than our kill.
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=_DYING_SECONDS)
        self._process.kill()
        # Stuck in the kernel (a dead network drive), even a killed process lingers; `subprocess` reaps it later.
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=_KILLED_SECONDS)
        return -signal.SIGKILL

    def abandon(self) -> None:
        """Forget the process without touching it: after a fork it belongs to the other side."""
        self.gone = True
        self._socket.close()
        self._process.returncode = 0
