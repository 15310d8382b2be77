"""Spider 2.0's golds: tables in CSV files, against which an answer's result is held. No gold query judges anybody.

Where a question has a gold query too, the audit runs it and holds it against the tables like any answer: some do not
pass, which says something about the tables or the copy of the database, and nothing about a model.
"""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eval.gold import OK, Gold, Shape
from eval.goldbook import Judgement
from eval.scorers import spider2
from eval.scorers.bird import execute
from shared.data.example import Example
from shared.sql.sandbox import Limits, QueryResult, Sandbox


class TableBook:
    """The book of a benchmark whose golds are tables. See `eval.goldbook.Book`."""

    def __init__(self, sandbox: Sandbox, limits: Limits, *, audit: bool = True):
        """Without `audit` gold queries are not run."""
        self._sandbox, self._limits, self._audit = sandbox, limits, audit
        self._lock = threading.Lock()
        self._golds: dict[str, Gold] = {}
        self._seconds: dict[str, float] = {}

    def count(self, examples: Iterable[Example]) -> int:
        """How many golds `prepare` would examine."""
        return len({example.question_id for example in examples})

    def prepare(self, examples: Iterable[Example], threads: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Read every gold table, and see whether it and its gold query pass. SetupError for a missing file."""
        unique = {example.question_id: example for example in examples}
        with ThreadPoolExecutor(threads, thread_name_prefix="gold") as pool:
            for _ in pool.map(self.gold, unique.values()):
                on_done()

    def gold(self, example: Example) -> Gold:
        """What this example's gold tables are worth."""
        with self._lock:
            if example.question_id in self._golds:
                return self._golds[example.question_id]
        gold = self._examine(example)
        with self._lock:
            return self._golds.setdefault(example.question_id, gold)

    def seconds(self, example: Example) -> float | None:
        """How long the gold query took, None where there is none."""
        return self._seconds.get(example.question_id)

    def judge(self, example: Example, pred: QueryResult | None) -> Judgement:
        """Hold an executed answer (None: no answer) against the gold tables."""
        return Judgement(self.gold(example), spider2.score_result(pred, _tables(example)), None)

    def _examine(self, example: Example) -> Gold:
        tables = _tables(example)
        lines = {name: spider2.count_rows(csv) for name, csv in tables.csvs.items()}
        first = tables.csvs[min(tables.csvs)]
        if (verdict := spider2.score_csv(first, tables)).score < 1.0:
            return Gold("gold_error", f"the gold table does not pass itself: {verdict.reason}", flags=("gold_error",))
        flags: list[str] = []
        message = ""
        if self._audit and example.gold_sql.strip():
            result = execute(self._sandbox, example.database, example.gold_sql, self._limits)
            with self._lock:
                self._seconds[example.question_id] = result.seconds
            official = spider2.score_result(result, tables).official
            if official.score < 1.0:
                flags.append("gold_mismatch")
                message = f"gold query: {official.reason.removeprefix('answer: ')}"
        empty = 0 in lines.values()
        flags += ["gold_empty"] if empty else []
        shape: Shape = "empty" if empty else "rows"
        return Gold(flags[0] if flags else OK, message, max(lines.values()), shape, False, tuple(flags))


def _tables(example: Example) -> spider2.GoldTables:
    meta = example.meta
    return spider2.load_gold(
        Path(meta["gold_folder"]), example.question_id, meta["condition_cols"], meta["ignore_order"]
    )
