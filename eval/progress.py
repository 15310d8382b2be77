"""What a run shows while it goes on (rate, time left, accuracy so far), and the table at its end."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shared.text import plain

_PLAIN_SECONDS = 10.0
_LISTED = 20


class Stage:
    """One counted stretch of a run."""

    def __init__(self, label: str, total: int, done: Sequence[Mapping[str, Any]], bar: Bar | None, console: Console):
        self._label, self._total, self._bar, self._console = label, total, bar, console
        self._count = self._resumed = len(done)
        self._scored, self._right = 0, 0.0
        self._start = self._shown = time.monotonic()
        for record in done:
            self._tally(record)
        self._task = bar.add_task(label, total=total, completed=self._count, figures=self._figures()) if bar else None

    def advance(self, record: Mapping[str, Any] | None = None) -> None:
        """One more is done; an episode's record adds to the accuracy shown."""
        self._count += 1
        if record is not None:
            self._tally(record)
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._count, figures=self._figures())
        elif now - self._shown >= _PLAIN_SECONDS:
            self._shown = now
            self._console.print(self._line(now))

    def finish(self) -> None:
        """Say how it ended where no bar shows it."""
        if self._bar is None:
            self._console.print(self._line(time.monotonic()))

    def _tally(self, record: Mapping[str, Any]) -> None:
        if record["status"] == "scored":
            self._scored += 1
            self._right += record["scores"]["official"]["score"]

    def _figures(self) -> str:
        rate = (self._count - self._resumed) / max(time.monotonic() - self._start, 1e-9)
        accuracy = f"  official {self._right / self._scored:.3f}" if self._scored else ""
        return f"{rate:.1f}/s{accuracy}"

    def _line(self, now: float) -> str:
        elapsed, new = now - self._start, self._count - self._resumed
        left = (
            f", {elapsed / new * (self._total - self._count):.0f} s left" if new and self._count < self._total else ""
        )
        return f"{self._label}: {self._count}/{self._total}  {self._figures()}  {elapsed:.0f} s{left}"


class Progress:
    """A bar on a terminal, a line every ten seconds elsewhere; always on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )

    def note(self, text: str) -> None:
        """One line about what happens now."""
        self._console.print(text, markup=False)

    @contextmanager
    def stage(self, label: str, total: int, done: Sequence[Mapping[str, Any]] = ()) -> Iterator[Stage]:
        """Count to `total`, of which `done` (episode records) are there already."""
        stage = Stage(label, total, done, self._bar, self._console)
        yield stage
        stage.finish()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_summary(summary: Mapping[str, Any], folder: Path) -> None:
    """The figures of a finished run on stdout."""
    console = Console(file=sys.stdout, highlight=False)
    identity = summary["identity"]
    title = f"{identity['benchmark']}, {identity['mode']}: {identity['model'] or identity['engine']}"
    table = Table(title=title, title_justify="left")
    for column in ("", "n", "official", "95% CI", "strict", "fair"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(*_score_row("all", summary["n"], summary, summary.get("official_ci")))
    vote = summary["samples"].get("vote")
    if vote:
        table.add_row(*_score_row(f"vote of {summary['samples']['k']}", vote["n"], vote, vote["ci"]))
    if len(summary["by_difficulty"]) > 1:
        for label, scores in summary["by_difficulty"].items():
            table.add_row(*_score_row(label, scores["n"], scores, None))
    console.print(table)
    rates = ("submit_rate", "executes_rate", "fallback_rate", "truncation_rate")
    means = ("mean_turns", "mean_calls", "mean_tokens")
    console.print("  ".join(f"{key.removesuffix('_rate')} {_figure(summary[key])}" for key in rates))
    console.print("  ".join(f"{key.replace('_', ' ')} {_figure(summary[key], 1)}" for key in means))
    for line in [*_served_lines(identity), *_sample_lines(summary["samples"]), *_gold_lines(summary["gold"])]:
        console.print(line, markup=False, soft_wrap=True)
    if summary["excluded"]:
        console.print(f"{len(summary['excluded'])} of {summary['n_episodes']} episodes have no verdict:")
        for item in summary["excluded"][:_LISTED]:
            line = plain(f"{item['question_id']}  {item['status']}  {item['reason']}")
            console.print(f"  {line}", markup=False, soft_wrap=True)
        if len(summary["excluded"]) > _LISTED:
            console.print(f"  … and {len(summary['excluded']) - _LISTED} more, in summary.json")
    console.print(f"written to {folder}", markup=False, soft_wrap=True)


def _score_row(label: str, n: int, scores: Mapping[str, Any], ci: Sequence[float] | None) -> list[str]:
    interval = f"{ci[0]:.3f} – {ci[1]:.3f}" if ci else ""
    return [
        label,
        str(n),
        _figure(scores["official"]),
        interval,
        _figure(scores["strict"]),
        _figure(scores.get("fair")),
    ]


def _served_lines(identity: Mapping[str, Any]) -> list[str]:
    """How a server was asked, and what a token is when its own stay unknown."""
    settings = identity.get("engine_settings", {})
    if "endpoint" not in settings:
        return []
    line = f"{settings['served_model']} was sent {settings['prompts']} through {settings['endpoint']}"
    if "tokens" in settings:
        line += f"; tokens above are {settings['tokens']}"
    if settings.get("not_applied"):
        line += f"; the server does not take {', '.join(settings['not_applied'])}"
    return [line]


def _sample_lines(samples: Mapping[str, Any]) -> Iterator[str]:
    if samples["k"] < 2 or "vote" not in samples:
        return
    yield (
        f"mean of {samples['k']} samples a question; each sample: {' '.join(map(_figure, samples['per_sample']))}; "
        f"some sample right {_figure(samples['any_right'])}"
    )
    yield f"flip rate {_figure(samples['flip_rate'])}: share of questions on which two samples differ in their verdict"
    vote = samples["vote"]
    yield (
        f"vote: {vote['ties']} ties, {vote['without_vote']} questions without a vote, "
        f"agreement {_figure(vote['agreement'])}"
    )


def _gold_lines(gold: Mapping[str, Any]) -> Iterator[str]:
    for flag, questions in gold["flagged"].items():
        without = gold["official_without"].get(flag)
        score = f"; official without {_figure(without)}" if flag in gold["official_without"] else ", left out"
        yield f"{flag}: {len(questions)} of {gold['n']} questions{score}"
    if gold["share_trivial"]:
        yield (
            f"gold empty, NULL or 0: {_figure(gold['share_trivial'])} of the scored questions; official without them "
            f"{_figure(gold['official_without_trivial'])}"
        )
    if gold["ties_unchecked"]:
        yield f"ties unchecked: {len(gold['ties_unchecked'])} golds"


def _figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
