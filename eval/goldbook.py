"""Gold queries, executed before any model is: examined once, remembered, and held against the answers.

Examining a gold means: it runs twice, then under PRAGMA reverse_unordered_selects, then with every ORDER BY … LIMIT
extended so that ties are cut in two other orders (`eval.sqltext`). Results are compared as sets of rows, the
official rule. All runs have the gold's own limits, none of them the model's.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from eval.gold import Gold, describe
from eval.goldcache import Examined, GoldCache
from eval.scorers.base import Scores
from eval.scorers.bird import execute, execute_many
from eval.sqltext import asks_the_clock, orders_result, tie_variants
from shared.data.example import Example
from shared.database import Database
from shared.sql.results import official_equal, rounded
from shared.sql.sandbox import Limits, QueryResult, Sandbox

_TOGETHER = 8  # golds of one database that are examined together
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
        by_database: dict[str, list[Example]] = {}
        for example in unique.values():
            by_database.setdefault(example.database.content_hash, []).append(example)
        chunks = [group[i : i + _TOGETHER] for group in by_database.values() for i in range(0, len(group), _TOGETHER)]
        with ThreadPoolExecutor(threads, thread_name_prefix="gold") as pool:
            for number in pool.map(self._prepare, chunks):
                for _ in range(number):
                    on_done()

    def gold(self, example: Example) -> Gold:
        """What this example's gold is worth."""
        if not example.gold_sql.strip():
            return MISSING
        key = _key(example)
        with self._lock:
            if key in self._golds:
                return self._golds[key]
        self._prepare([example])
        return self._golds[key]

    def _prepare(self, examples: Sequence[Example]) -> int:
        """Get golds of one database from the cache or examine them; how many they are."""
        found: dict[Key, Examined] = {}
        if self._cache:
            cached = [(_key(example), self._cache.get(example, self._limits, self._audit)) for example in examples]
            found = {key: examined for key, examined in cached if examined is not None}
        missing = [example for example in examples if _key(example) not in found]
        if missing:
            examined = examine_many(self._sandbox, missing, self._limits, audit=self._audit)
            for example, one in zip(missing, examined, strict=True):
                found[_key(example)] = one
                if self._cache:
                    self._cache.put(example, self._limits, self._audit, one)
        with self._lock:
            for key, one in found.items():
                self._golds[key], self._seconds[key] = one.gold, one.seconds
                if one.result is not None:
                    self._keep(key, one.result)
        return len(examples)

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
        gold = describe(result, gold.flags, ties_checked=gold.ties_checked, repeats=gold.repeats)
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
    return examine_many(sandbox, [example], limits, audit=audit)[0]


def examine_many(
    sandbox: Sandbox, examples: Sequence[Example], limits: Limits, *, audit: bool = True
) -> list[Examined]:
    """`examine` for golds on one database, which share messages to a worker."""
    database = examples[0].database
    golds = [example.gold_sql for example in examples]
    firsts = execute_many(sandbox, database, golds, limits)
    examined = []
    for sql, first in zip(golds, firsts, strict=True):
        gold = describe(first, ("gold_clock",) if asks_the_clock(sql) else ())
        examined.append(Examined(gold, first if gold.usable else None, first.seconds))
    if not audit:
        return examined
    ran = [i for i, one in enumerate(examined) if one.result is not None]
    seconds = execute_many(sandbox, database, [golds[i] for i in ran], limits)
    still = []
    for i, second in zip(ran, seconds, strict=True):
        again = describe(second)
        if not again.usable:
            gold = Gold(again.status, f"in its second run: {again.message}", flags=again.flags)
            examined[i] = Examined(gold, None, examined[i].seconds)
        elif not official_equal(firsts[i].rows, second.rows):
            examined[i] = replace(examined[i], gold=describe(firsts[i], ("gold_clock",), repeats=False))
        if "gold_clock" not in examined[i].gold.flags and examined[i].result is not None:
            still.append(i)
    for i, varied in zip(still, _variations(sandbox, database, golds, firsts, still, limits), strict=True):
        flags, checked = _look(firsts[i], varied)
        examined[i] = replace(examined[i], gold=describe(firsts[i], flags, ties_checked=checked))
    return examined


def _variations(
    sandbox: Sandbox,
    database: Database,
    golds: Sequence[str],
    firsts: Sequence[QueryResult],
    wanted: Sequence[int],
    limits: Limits,
) -> list[list[QueryResult]]:
    """For each gold that is wanted, its results under the other orders that its SQL allows."""
    reverse = execute_many(sandbox, database, [golds[i] for i in wanted], limits, reverse_unordered=True)
    found = [[result] for result in reverse]
    variants = [
        (place, sql) for place, i in enumerate(wanted) for sql in tie_variants(golds[i], len(firsts[i].columns))
    ]
    results = execute_many(sandbox, database, [sql for _, sql in variants], limits)
    for (place, _), result in zip(variants, results, strict=True):
        found[place].append(result)
    return found


def _look(first: QueryResult, varied: Sequence[QueryResult]) -> tuple[tuple[str, ...], bool]:
    """What the varied results say of a gold: its flags, and whether all of them could be had."""
    usable = [result for result in varied if describe(result).usable]
    differing = [result for result in usable if not official_equal(first.rows, result.rows)]
    kinds = {official_equal(rounded(first.rows), rounded(result.rows)) for result in differing}
    flags = tuple(flag for flag, same in (("gold_tie", False), ("gold_float", True)) if same in kinds)
    return flags, len(usable) == len(varied)
