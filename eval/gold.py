"""Gold results: executed once per (database, SQL), before any model is, and never charged to a model.

A gold that fails, runs out of its own time, or breaks a limit cannot judge anybody. Such a question keeps
its episode on record, has no verdict, is listed with its status, and is left out of every denominator.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eval.scorers.bird import execute, has_undecodable
from shared.data.example import Example
from shared.sql.sandbox import Limits, QueryResult, Sandbox

GoldStatus = Literal["ok", "gold_missing", "gold_error", "gold_timeout", "gold_limit"]
Shape = Literal["rows", "empty", "one_null", "one_zero"]
EXCLUSION_RULE = "a question whose gold query is missing, fails, or breaks its time or size limit has no verdict"

_KEPT_CELLS = 5_000_000  # results held in memory at once; beyond that a gold runs again when needed
_STATUS: dict[str, GoldStatus] = {"timeout": "gold_timeout", "limit": "gold_limit"}


@dataclass(frozen=True)
class Gold:
    """How a gold query ran. `shape` tells apart results that a degenerate answer would match."""

    status: GoldStatus
    message: str = ""
    rows: int = 0
    shape: Shape | None = None
    undecodable: bool = False

    @property
    def usable(self) -> bool:
        """True when an answer can be held against this gold."""
        return self.status == "ok"

    def to_json(self) -> dict[str, Any]:
        """Plain data for a record."""
        return asdict(self)


def describe(result: QueryResult) -> Gold:
    """What an executed gold is good for."""
    if result.outcome != "ok" or result.truncated:
        status = _STATUS.get("limit" if result.outcome == "ok" else result.outcome, "gold_error")
        return Gold(status, result.message)
    return Gold("ok", "", len(result.rows), _shape(result), has_undecodable(result))


def _shape(result: QueryResult) -> Shape:
    if not result.rows:
        return "empty"
    if len(result.rows) == 1 and len(result.rows[0]) == 1:
        cell = result.rows[0][0]
        if cell is None:
            return "one_null"
        if cell == 0:
            return "one_zero"
    return "rows"


class GoldBook:
    """Runs gold queries through the sandbox under their own limits and remembers them. Thread-safe."""

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self._sandbox, self._limits = sandbox, limits
        self._lock = threading.Lock()
        self._described: dict[tuple[str, str], Gold] = {}
        self._results: dict[tuple[str, str], QueryResult] = {}
        self._cells = 0

    def prepare(self, examples: Iterable[Example], threads: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Run every distinct gold. SetupError when a database cannot be used."""
        unique = {self._key(example): example for example in examples if example.gold_sql.strip()}
        with ThreadPoolExecutor(threads, thread_name_prefix="gold") as pool:
            for _ in pool.map(self.gold, unique.values()):
                on_done()

    @classmethod
    def count(cls, examples: Iterable[Example]) -> int:
        """How many distinct golds `prepare` would run."""
        return len({cls._key(example) for example in examples if example.gold_sql.strip()})

    def gold(self, example: Example) -> Gold:
        """How this example's gold runs."""
        if not example.gold_sql.strip():
            return Gold("gold_missing", "the question has no gold SQL")
        key = self._key(example)
        with self._lock:
            if key in self._described:
                return self._described[key]
        self._run(example)
        return self._described[key]

    def result(self, example: Example) -> QueryResult:
        """The gold's rows, from memory where they were kept, else executed again."""
        with self._lock:
            kept = self._results.get(self._key(example))
        return kept if kept is not None else self._run(example)

    def _run(self, example: Example) -> QueryResult:
        result = execute(self._sandbox, example.database, example.gold_sql, self._limits)
        key, cells = self._key(example), len(result.rows) * max(len(result.columns), 1)
        with self._lock:
            self._described.setdefault(key, describe(result))
            if key not in self._results and self._cells + cells <= _KEPT_CELLS:
                self._results[key] = result
                self._cells += cells
        return result

    @staticmethod
    def _key(example: Example) -> tuple[str, str]:
        return example.database.content_hash, example.gold_sql
