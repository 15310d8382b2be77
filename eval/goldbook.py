"""Gold queries, executed before any model is: examined once, remembered, and held against the answers.

Examining a gold means: it runs twice, then under PRAGMA reverse_unordered_selects, then with every ORDER BY … LIMIT
extended so that ties are cut in two other orders (`eval.sqltext`). Results are compared as sets of rows, the
official rule. All runs have the gold's own limits, none of them the model's.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from eval.gold import Gold, describe
from eval.goldcache import Examined, GoldCache
from eval.scorers.base import Scores
from eval.scorers.bird import execute
from eval.sqltext import asks_the_clock, orders_result, tie_variants
from shared.data.example import Example
from shared.sql.results import official_equal, rounded
from shared.sql.sandbox import Limits, QueryResult, Sandbox

_KEPT_CELLS = 5_000_000  # results held in memory at once; beyond that a gold runs again when needed
MISSING = Gold("gold_missing", "the question has no gold SQL", flags=("gold_missing",))
Key = tuple[str, str]


class ScoreResults(Protocol):
    """A rule over two executed queries: `eval.scorers.bird.score_results` and its like."""

    def __call__(self, pred: QueryResult | None, gold: QueryResult, *, ordered: bool | None) -> Scores: ...


@dataclass(frozen=True)
class Judgement:
    """What an answer was held against, and the scores; None when the gold could not judge after all."""

    gold: Gold
    scores: Scores | None
    gold_result: QueryResult | None


class Book(Protocol):
    """The golds of a benchmark. Thread-safe."""

    def count(self, examples: Iterable[Example]) -> int:
        """How many golds `prepare` would examine."""

    def prepare(self, examples: Iterable[Example], threads: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Examine every gold. SetupError when a database or a gold file cannot be used."""

    def gold(self, example: Example) -> Gold:
        """What this example's gold is worth."""

    def seconds(self, example: Example) -> float | None:
        """How long its first run took, None when nothing ran."""

    def judge(self, example: Example, pred: QueryResult | None) -> Judgement:
        """Hold an executed answer (None: no answer) against a gold that is usable."""


class GoldBook:
    """The book of a benchmark whose golds are queries."""

    def __init__(
        self,
        sandbox: Sandbox,
        limits: Limits,
        score_results: ScoreResults,
        *,
        cache: GoldCache | None = None,
        audit: bool = True,
    ):
        """Without `audit` a gold runs once, and only what that shows is known of it."""
        self._sandbox, self._limits, self._score, self._cache, self._audit = (
            sandbox,
            limits,
            score_results,
            cache,
            audit,
        )
        self._lock = threading.Lock()
        self._golds: dict[Key, Gold] = {}
        self._seconds: dict[Key, float] = {}
        self._results: dict[Key, QueryResult] = {}
        self._cells = 0

    def count(self, examples: Iterable[Example]) -> int:
        """How many distinct golds `prepare` would examine."""
        return len({_key(example) for example in examples if example.gold_sql.strip()})

    def prepare(self, examples: Iterable[Example], threads: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Examine every distinct gold. SetupError when a database cannot be used."""
        unique = {_key(example): example for example in examples if example.gold_sql.strip()}
        with ThreadPoolExecutor(threads, thread_name_prefix="gold") as pool:
            for _ in pool.map(self.gold, unique.values()):
                on_done()

    def gold(self, example: Example) -> Gold:
        """What this example's gold is worth."""
        if not example.gold_sql.strip():
            return MISSING
        key = _key(example)
        with self._lock:
            if key in self._golds:
                return self._golds[key]
        examined = self._cache.get(example, self._limits, self._audit) if self._cache else None
        if examined is None:
            examined = examine(self._sandbox, example, self._limits, audit=self._audit)
            if self._cache:
                self._cache.put(example, self._limits, self._audit, examined)
        with self._lock:
            self._golds[key], self._seconds[key] = examined.gold, examined.seconds
            if examined.result is not None:
                self._keep(key, examined.result)
        return examined.gold

    def seconds(self, example: Example) -> float | None:
        """How long the gold's first run took (in an earlier run, where the result was cached)."""
        return self._seconds.get(_key(example))

    def result(self, example: Example) -> tuple[Gold, QueryResult]:
        """The gold's rows: from memory where they were kept, else executed again, which may fail this time.

        A gold that asks the clock always runs again: an answer is held against what gold says at the same time.
        """
        gold, key = self.gold(example), _key(example)
        with self._lock:
            kept = self._results.get(key)
        if kept is not None:
            return gold, kept
        result = execute(self._sandbox, example.database, example.gold_sql, self._limits)
        gold = describe(result, gold.flags, ties_checked=gold.ties_checked)
        if gold.usable:
            with self._lock:
                self._keep(key, result)
        return gold, result

    def judge(self, example: Example, pred: QueryResult | None) -> Judgement:
        """Hold an executed answer (None: no answer) against the gold."""
        gold, result = self.result(example)
        if not gold.usable:
            return Judgement(gold, None, result)
        return Judgement(gold, self._score(pred, result, ordered=orders_result(example.gold_sql)), result)

    def _keep(self, key: Key, result: QueryResult) -> None:
        """With the lock held."""
        cells = len(result.rows) * max(len(result.columns), 1)
        if (
            key not in self._results
            and "gold_clock" not in self._golds[key].flags
            and self._cells + cells <= _KEPT_CELLS
        ):
            self._results[key] = result
            self._cells += cells


def _key(example: Example) -> Key:
    return example.database.content_hash, example.gold_sql


def examine(sandbox: Sandbox, example: Example, limits: Limits, *, audit: bool = True) -> Examined:
    """Run a gold, and with `audit` see what its result hangs on. SetupError when the database cannot be used."""
    sql, database = example.gold_sql, example.database
    first = execute(sandbox, database, sql, limits)
    clock = ("gold_clock",) if asks_the_clock(sql) else ()
    gold = describe(first, clock)
    if not gold.usable:
        return Examined(gold, None, first.seconds)
    if not audit:
        return Examined(gold, first, first.seconds)
    second = execute(sandbox, database, sql, limits)
    if not (again := describe(second)).usable:
        return Examined(
            Gold(again.status, f"in its second run: {again.message}", flags=again.flags), None, first.seconds
        )
    if not clock and not official_equal(first.rows, second.rows):
        clock = ("gold_clock",)
    flags, checked = set[str](clock), True
    for varied in () if clock else _variations(sandbox, example, limits, len(first.columns)):
        if not describe(varied).usable:
            checked = False
        elif not official_equal(first.rows, varied.rows):
            flags.add("gold_float" if official_equal(rounded(first.rows), rounded(varied.rows)) else "gold_tie")
            if "gold_tie" in flags:
                break
    return Examined(describe(first, tuple(flags), ties_checked=checked), first, first.seconds)


def _variations(sandbox: Sandbox, example: Example, limits: Limits, width: int) -> Iterator[QueryResult]:
    """The gold's results under the other orders that its SQL allows."""
    yield sandbox.query(example.database, example.gold_sql, limits, reverse_unordered=True)
    for sql in tie_variants(example.gold_sql, width):
        yield sandbox.query(example.database, sql, limits)
