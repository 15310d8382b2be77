"""Leaving in order: a signal, or a file named STOP in the run's folder, makes every rank save and go.

The handler sets a flag and leaves the file, so that a signal to one rank reaches the others. The flag is looked at
between the engine's steps and between micro-batches; nothing of the step in progress is kept.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shared.engines.base import Completion, Engine, Request
from shared.errors import SetupError

# EX_TEMPFAIL of sysexits.h: "try again later". A scheduler requeues on it, and the run continues.
EXIT_REQUEUE = 75
STOP_FILE = "STOP"
LOCK = ".lock"
_LOOK_EVERY = 1.0


@contextmanager
def only_one(output: Path) -> Iterator[None]:
    """Hold the run's folder while inside. SetupError when another process on this machine holds it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(f"output: {output} is in use by another run; wait for it or give another folder") from None
        yield


class StopRequested(Exception):
    """The step in progress is abandoned; the weights are those of the last finished step."""


class StopFlag:
    """Whether this run was asked to stop, on any rank."""

    def __init__(self, output: Path) -> None:
        self._file = output / STOP_FILE
        self._looked = 0.0
        self.signal: int | None = None

    @contextmanager
    def installed(self) -> Iterator["StopFlag"]:
        """Handle SIGTERM, SIGUSR1 and SIGINT inside; a second Ctrl-C interrupts as usual."""
        owner = os.getpid()
        names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {number: signal.getsignal(number) for number in names}

        def handle(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a forked child that inherited the handler
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
                return
            if number == signal.SIGINT and self.signal == signal.SIGINT:
                raise KeyboardInterrupt
            self.signal = number

        for number in names:
            signal.signal(number, handle)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def requested(self) -> bool:
        """True once a signal came or the file is there; looks at the file about once a second."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_EVERY:
            self._looked = now
            if self.signal is None and self._file.exists():
                self.signal = signal.SIGTERM
            elif self.signal is not None:
                self._file.touch()
        return self.signal is not None

    def poll(self) -> None:
        """Raise StopRequested when asked to stop."""
        if self.requested():
            raise StopRequested

    def announce(self) -> None:
        """Tell the other ranks at once."""
        if self.signal is not None:
            self._file.touch()

    def clear(self) -> None:
        """Remove the file, so that the next start does not stop at once."""
        self._file.unlink(missing_ok=True)

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, else the requeue code."""
        return 130 if self.signal == signal.SIGINT else EXIT_REQUEUE


class StoppableEngine:
    """An engine that looks at the flag before each step."""

    def __init__(self, engine: Engine, flag: StopFlag) -> None:
        self._engine = engine
        self._flag = flag

    @property
    def batches_by_itself(self) -> bool:
        return self._engine.batches_by_itself

    def add(self, request: Request) -> None:
        self._engine.add(request)

    def step(self) -> list[Completion]:
        self._flag.poll()
        return self._engine.step()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def end_session(self, session: str) -> None:
        self._engine.end_session(session)

    def close(self) -> None:
        self._engine.close()
