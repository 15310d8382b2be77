"""What a run says while it runs: one JSON line a step in a file, one readable line a step on the terminal."""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from train.selection import VALIDATION
from train.trackers import Tracker, numbers

METRICS = "metrics.jsonl"
_ETA_WINDOW = 20


def format_seconds(seconds: float) -> str:
    """`8s`, `3m05s`, `2h10m`, `1d19h`."""
    s = max(round(seconds), 0)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600}h"


def step_line(figures: Mapping[str, Any], total: int, eta_seconds: float) -> str:
    """The terminal's line for one step: what a person watches a run by."""
    parts = [
        f"step {int(figures['step']) + 1}/{total}",
        f"reward {figures['reward']:.3f}",
        f"exact {100 * figures['exact']:.1f}%",
        "tiers "
        + "/".join(f"{100 * figures[f'tier_{t}']:.0f}" for t in ("equivalent", "executable", "parsable", "invalid")),
        f"turns {figures['turns']:.1f}",
        f"calls {figures['calls']:.1f}",
        f"q {figures['quantile']:.2f}",
        f"dropped {int(figures['groups_dropped'])}",
    ]
    if figures["empty"]:
        parts.append("EMPTY: no group with a signal")
    else:
        parts += [
            f"kl {figures['kl']:.4f}",
            f"ratio {figures['ratio_min']:.3f}..{figures['ratio_max']:.3f}",
            f"gap {figures['gap_mean']:.1e}",
            f"|g| {figures['grad_norm']:.2f}",
        ]
    seconds = {name: figures.get(f"seconds_{name}", 0.0) for name in ("sync", "rollout", "score", "update")}
    phases = " ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    parts += [f"{figures['tokens_per_second']:.0f} tok/s", f"{phases} s", f"ETA {format_seconds(eta_seconds)}"]
    return "  ".join(parts)


class RunLog:
    """Writes metrics.jsonl in `output` and the terminal's lines; does nothing on ranks that are not `main`."""

    def __init__(self, output: Path, total: int, *, main: bool = True, console: Console | None = None) -> None:
        self.path = output / METRICS
        self.validations = output / VALIDATION
        self.total = total
        self.main = main
        self.console = console or Console(stderr=True, soft_wrap=True, highlight=False)
        self.trackers: list[Tracker] = []
        self._seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._status: Status | None = None

    def drop_from(self, step: int) -> None:
        """Forget what a killed run logged and the resumed one does again: steps from `step` on, later validations."""
        if self.main:
            _keep_below(self.path, step)
            # A step is counted from 0 when it begins, a validation by the number of steps finished.
            _keep_below(self.validations, step + 1)

    def say(self, text: str) -> None:
        """A line on the terminal."""
        if self.main:
            self.console.print(text, markup=False)

    def phase(self, text: str) -> None:
        """What the run is doing right now; shown on a terminal alone, and gone with the step's line."""
        if not self.main or not self.console.is_terminal:
            return
        if self._status is None:
            self._status = self.console.status(text)
            self._status.start()
        self._status.update(text)

    def step(self, figures: Mapping[str, Any]) -> None:
        """Log one finished step: `figures` holds at least what `step_line` shows, and `seconds`."""
        self._seconds.append(figures["seconds"])
        if not self.main:
            return
        left = self.total - figures["step"] - 1
        eta = left * sum(self._seconds) / len(self._seconds)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _clean(value) for name, value in figures.items()}) + "\n")
        self.console.print(step_line(figures, self.total, eta), markup=False)
        self._track(figures["step"], numbers(figures))

    def validation(self, line: Mapping[str, Any], text: str) -> None:
        """Log one validation: its line for the file, and what the terminal says."""
        if not self.main:
            return
        with self.validations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self.console.print(text, markup=False)
        self._track(max(line["step"] - 1, 0), numbers(line, "validation/"))

    def _track(self, step: int, figures: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, figures)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()
        self.trackers = []
        if self._status is not None:
            self._status.stop()
            self._status = None


def _keep_below(path: Path, step: int) -> None:
    """Rewrite a file of JSON lines without those whose step is `step` or later, or that a kill has cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] < step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _clean(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=True) + "\n")


class Stopwatch:
    """Seconds by phase: `lap(name)` charges the time since the last lap to `name`."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
