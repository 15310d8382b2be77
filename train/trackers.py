"""Experiment trackers beside the local files: tensorboard, wandb, trackio. They may fail or hang; the run may not.

Each tracker lives in a daemon thread of its own, from its import to its end. What it is given waits in a bounded queue:
a tracker that is slow loses figures, one that raises is switched off with one line on the terminal, one that
hangs is left behind at the end of the run. metrics.jsonl has everything in any case.
"""

import importlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

TrackerName = Literal["tensorboard", "wandb", "trackio"]
_WAITING = 256
_LEAVE_AFTER = 8.0


class Backend(Protocol):
    """A tracker that is open. Both methods may raise whatever they like."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of one step."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    """Event files in the run's folder; a resumed run writes another file there, and its steps win."""

    def __init__(self, output: Path, project: str, settings: Mapping[str, Any], start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(output / "tensorboard"), purge_step=start)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Offline unless WANDB_MODE says otherwise, all of its files in the run's folder.

    A continued run is another run of the same group: one id used twice overwrites or drops steps.
    """

    def __init__(self, output: Path, project: str, settings: Mapping[str, Any], start: int) -> None:
        os.environ.setdefault("WANDB_MODE", "offline")
        for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
            os.environ.setdefault(name, str(output / "wandb"))
        wandb: Any = importlib.import_module("wandb")
        name = output.name if start == 0 else f"{output.name} from step {start}"
        self._run: Any = wandb.init(
            project=project, name=name, group=output.name, dir=str(output), config=dict(settings)
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    """A local trackio project in the run's folder."""

    def __init__(self, output: Path, project: str, settings: Mapping[str, Any], start: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(output / "trackio"))
        self._trackio: Any = importlib.import_module("trackio")
        name = output.name if start == 0 else f"{output.name} from step {start}"
        self._trackio.init(project=project, name=name, group=output.name, config=dict(settings))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        self._trackio.finish()


BACKENDS: Mapping[TrackerName, Callable[[Path, str, Mapping[str, Any], int], Backend]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


class Tracker:
    """One tracker in its thread. No method raises, and none waits but `close`, up to `_LEAVE_AFTER` seconds."""

    def __init__(self, name: TrackerName, open_backend: Callable[[], Backend], report: Callable[[str], None]) -> None:
        self.name = name
        self._report = report
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(_WAITING)
        self._lost = 0
        self._failed = False
        self._thread = threading.Thread(target=self._work, args=(open_backend,), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def _work(self, open_backend: Callable[[], Backend]) -> None:
        try:
            backend = open_backend()
            while (item := self._queue.get()) is not None:
                backend.log(*item)
            backend.close()
        except ImportError as error:
            self._off(f"it is not installed ({error})")
        # Trackers end the program on some errors; here that is the end of their thread.
        except (Exception, SystemExit) as error:
            self._off(f"{type(error).__name__}: {error}")

    def _off(self, why: str) -> None:
        self._failed = True
        self._report(f"tracker {self.name} is off, training goes on: {why}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Hand figures over."""
        if self._failed:
            return
        try:
            self._queue.put_nowait((step, figures))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Let it finish, but not for long."""
        if not self._failed:
            try:
                self._queue.put(None, timeout=_LEAVE_AFTER / 2)
            except queue.Full:
                self._lost += 1
            self._thread.join(_LEAVE_AFTER / 2)
            if self._thread.is_alive():
                self._report(f"tracker {self.name} did not finish in {_LEAVE_AFTER:.0f} s and is left behind")
        if self._lost:
            self._report(f"tracker {self.name} was too slow and lost the figures of {self._lost} steps")


def open_trackers(
    names: tuple[TrackerName, ...],
    output: Path,
    project: str,
    settings: Mapping[str, Any],
    start: int,
    report: Callable[[str], None],
) -> list[Tracker]:
    """Start the trackers; `settings` is the run's config as plain data, `start` the first step that will be logged."""

    def opener(name: TrackerName) -> Callable[[], Backend]:
        return lambda: BACKENDS[name](output, project, settings, start)

    return [Tracker(name, opener(name), report) for name in names]


def numbers(figures: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numeric entries of nested figures under names joined by slashes; all else is left out.

    >>> numbers({"kl": 0.5, "full": {"calls": 3}, "weights": "ab", "best": True})
    {'kl': 0.5, 'full/calls': 3.0}
    """
    flat: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[prefix + name] = float(value)
    return flat
