"""How fast answers are scored: against a process pool that works as BIRD's official evaluator does.

    python scripts/bench/scoring.py [--workers 2] [--rounds 5]                 generated shop, light and heavy queries
    python scripts/bench/scoring.py --questions dev.json --databases DIR       golds of a real benchmark as predictions

The official way, written again from its description: a pool of processes; for each pair of prediction and gold a fresh
connection, both executed on it, within one limit of 30 s that is kept by a thread; the sets of rows compared; verdicts
collected by a callback and sorted. Ours: as in eval.run, with golds examined once beforehand.

Both sides score the same pairs in rounds that alternate, with workers started beforehand; the figure is the median
round. Ours is timed twice: `again` has its golds at hand, as every run has after the first over the same data; `first`
executes each distinct gold once within the time. A question is scored --samples times, as in a run with samples, or as
the questions of a benchmark are by one model after another. Verdicts must be the same on both sides. Prints Markdown.
"""

import argparse
import json
import multiprocessing
import multiprocessing.pool
import platform
import random
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from eval.config import parse_arguments
from eval.goldbook import GoldBook
from eval.run import evaluate
from eval.scorers import bird
from shared.cli import run_main
from shared.data.bird import load_questions
from shared.data.example import Example
from shared.database import Database
from shared.sql.sandbox import Limits, Sandbox

SECONDS = 30.0
CHUNK = 32
MAX_MS_PER_EPISODE = 5.0


@dataclass(frozen=True)
class Workload:
    """Pairs to score: `examples[i]` holds the gold, `answers[i]` the prediction."""

    name: str
    aim: float
    examples: list[Example]
    answers: list[str]


# ---- the official way


def within(seconds: float, function: Callable[..., int], *arguments: Any) -> int:
    """Run in a thread and wait; when it takes too long the thread is left to itself."""
    result: list[int] = []

    def work() -> None:
        result.append(function(*arguments))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError
    return result[0] if result else 0


def execute_pair(path: str, prediction: str, gold: str) -> int:
    """Both queries on one fresh connection; 1 for equal sets of rows. An error is for the caller."""
    connection = sqlite3.connect(path)
    try:
        cursor = connection.cursor()
        cursor.execute(prediction)
        predicted = cursor.fetchall()
        cursor.execute(gold)
        return int(set(predicted) == set(cursor.fetchall()))
    except sqlite3.Error:
        return 0
    finally:
        connection.close()


def official_pair(index: int, path: str, prediction: str, gold: str, seconds: float) -> tuple[int, int]:
    """One pair in a pool process."""
    try:
        return index, within(seconds, execute_pair, path, prediction, gold)
    except TimeoutError:
        return index, 0


def score_officially(workload: Workload, pool: multiprocessing.pool.Pool) -> list[int]:
    """All verdicts, in order."""
    collected: list[tuple[int, int]] = []
    waiting = []
    for i, (example, answer) in enumerate(zip(workload.examples, workload.answers, strict=True)):
        arguments = (i, str(example.database.path), answer, example.gold_sql, SECONDS)
        waiting.append(pool.apply_async(official_pair, arguments, callback=collected.append))
    for one in waiting:
        one.wait()
    # The last callback may still be under way when its result is there.
    while len(collected) < len(waiting):
        time.sleep(0.0001)
    return [verdict for _, verdict in sorted(collected)]


# ---- ours


def score_ours(workload: Workload, sandbox: Sandbox, book: GoldBook) -> list[int]:
    """All verdicts, in order, with as many threads as the sandbox has workers, as eval.run judges."""
    limits = Limits(seconds=SECONDS)
    book.prepare(workload.examples, sandbox.workers)

    def some(chunk: slice) -> list[int]:
        pairs = list(zip(workload.examples[chunk], workload.answers[chunk], strict=True))
        verdicts = []
        for _, group in groupby(pairs, key=lambda pair: pair[0].db_id):
            examples, answers = zip(*group, strict=True)
            results = bird.execute_many(sandbox, examples[0].database, answers, limits)
            for example, result in zip(examples, results, strict=True):
                scores = book.judge(example, result).scores
                verdicts.append(int(scores.official.score) if scores else 0)
        return verdicts

    with ThreadPoolExecutor(sandbox.workers) as threads:
        verdicts = threads.map(some, chunks(len(workload.answers), sandbox.workers))
        return [verdict for chunk in verdicts for verdict in chunk]


def chunks(n: int, workers: int) -> Iterator[slice]:
    """Pieces of a list of pairs, smaller towards its end, so that the workers finish together."""
    start = 0
    while start < n:
        size = max(1, min(CHUNK, (n - start) // (2 * workers)))
        yield slice(start, start + size)
        start += size


def new_book(sandbox: Sandbox) -> GoldBook:
    """Golds that are run once, without the audit: the other side does not look at them either."""
    rule = partial(bird.score_results, undecodable="fail")  # as the other side does
    return GoldBook(sandbox, Limits(seconds=SECONDS), rule, audit=False)


# ---- what is scored


def generated(folder: Path, heavy: bool, questions: int, samples: int, rng: random.Random) -> Workload:
    """A shop with one table of orders, and questions on it: look-ups by key, or grouped joins over all of it."""
    rows = 15_000 if heavy else 2_000
    path = folder / ("heavy" if heavy else "light") / "shop.sqlite"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT)")
    connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INT, amount INT, day TEXT)")
    connection.execute("CREATE INDEX orders_customer ON orders(customer)")
    cities = [f"city {i}" for i in range(40)]
    connection.executemany(
        "INSERT INTO customer VALUES (?, ?, ?)", [(i, f"name {i}", rng.choice(cities)) for i in range(500)]
    )
    connection.executemany(
        "INSERT INTO orders VALUES (?, ?, ?, ?)",
        [(i, rng.randrange(500), rng.randrange(1000), f"2024-{rng.randrange(1, 13):02}-01") for i in range(rows)],
    )
    connection.commit()
    connection.close()
    database = Database("shop", path=path)
    examples, answers = [], []
    for i in range(questions):
        gold, wrong = _heavy(i) if heavy else _light(i)
        example = Example(f"q{i}", "shop", "?", gold, database)
        for k in range(samples):
            examples.append(example)
            # A third of the answers is wrong; no two have the same text, as a model's don't.
            answers.append(f"{wrong if rng.random() < 1 / 3 else gold} /* {k} */")
    return Workload("heavy" if heavy else "light", 1.8 if heavy else 3.0, examples, answers)


def _light(i: int) -> tuple[str, str]:
    """A look-up by key, and one that is wrong."""
    query = "SELECT name, city FROM customer WHERE id IN ({}, {})"
    return query.format(i % 500, 7 * i % 500), query.format(i % 500, (7 * i + 1) % 500)


def _heavy(i: int) -> tuple[str, str]:
    """A grouped join, a scan of text, or a nested count over all orders, and one that is wrong."""
    query = (
        "SELECT c.city, count(*), sum(o.amount) FROM orders o JOIN customer c ON c.id = o.customer "
        "WHERE o.amount >= {} GROUP BY c.city",
        "SELECT count(*), max(amount) FROM orders WHERE day LIKE '%-0{}-%' AND amount * 3 % 7 <> 2",
        "SELECT count(*) FROM customer c WHERE (SELECT sum(amount) FROM orders o WHERE o.customer = c.id) > {} * 1000",
    )[i % 3]
    return query.format(i % 9), query.format(i % 9 + 1)


def real(questions: Path, databases: Path, samples: int) -> Workload:
    """The golds of a benchmark as predictions of themselves."""
    examples = [e for e in load_questions(questions, databases, present_only=True) for _ in range(samples)]
    return Workload(
        str(questions), 0.0, examples, [f"{e.gold_sql.rstrip('; ')} /* {i} */" for i, e in enumerate(examples)]
    )


# ---- measuring


def timed(score: Callable[[], list[int]]) -> tuple[float, list[int]]:
    """Seconds and verdicts."""
    started = time.perf_counter()
    verdicts = score()
    return time.perf_counter() - started, verdicts


def measure(workload: Workload, workers: int, rounds: int) -> str:
    """One row of the table. RuntimeError when the two sides do not agree on every verdict."""
    times: dict[str, list[float]] = {"official": [], "first": [], "again": []}
    with multiprocessing.get_context("fork").Pool(workers) as pool, Sandbox(workers=workers) as sandbox:
        pool.map(abs, range(100))
        kept = new_book(sandbox)
        reference = score_ours(workload, sandbox, kept)
        for _ in range(rounds):
            sides: dict[str, Callable[[], list[int]]] = {
                "official": lambda: score_officially(workload, pool),
                "first": lambda: score_ours(workload, sandbox, new_book(sandbox)),
                "again": lambda: score_ours(workload, sandbox, kept),
            }
            for side, score in sides.items():
                seconds, verdicts = timed(score)
                if verdicts != reference:
                    differing = [i for i, (a, b) in enumerate(zip(verdicts, reference, strict=True)) if a != b]
                    raise RuntimeError(
                        f"{workload.name}: verdicts differ on {len(differing)} pairs, {differing[0]} first"
                    )
                times[side].append(seconds)
    median = {side: statistics.median(seconds) for side, seconds in times.items()}
    n = len(workload.answers)
    ms = {side: 1000 * seconds / n for side, seconds in median.items()}
    ratios = " | ".join(f"{median['official'] / median[side]:.2f}" for side in ("first", "again"))
    aim = f"{workload.aim:.1f}" if workload.aim else ""
    cells = " | ".join(f"{ms[side]:.3f}" for side in ("official", "first", "again"))
    return f"| {workload.name} | {n} | {sum(reference)} | {cells} | {ratios} | {aim} |"


def harness(folder: Path, workers: int, episodes: int) -> str:
    """What an episode of the scripted engine costs from question to record: all of it is the harness."""
    workload = generated(folder, False, episodes, 1, random.Random(1))
    path = workload.examples[0].database.path
    assert path is not None
    (folder / "databases" / "shop").mkdir(parents=True)
    path.rename(folder / "databases" / "shop" / "shop.sqlite")
    rows = [
        {"question_id": e.question_id, "db_id": "shop", "question": "?", "query": e.gold_sql} for e in workload.examples
    ]
    (folder / "questions.json").write_text(json.dumps(rows))
    where = ["--questions", str(folder / "questions.json"), "--databases", str(folder / "databases"), "--no-cache"]
    config = parse_arguments(
        [*where, "--engine", "gold", "--no-audit", "--workers", str(workers), "--out", str(folder / "out")]
    )
    seconds, _ = timed(lambda: [int(evaluate(config)["n"])])
    ms = 1000 * seconds / episodes
    return (
        f"Harness: {episodes} episodes of the scripted engine, gold queries, scoring and files included: "
        f"{ms:.2f} ms an episode (aim: below {MAX_MS_PER_EPISODE:g})."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=2400, help="light pairs a round (heavy: a tenth)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes of the harness measurement (0: none)")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--databases", type=Path)
    arguments = parser.parse_args(argv)
    print(f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {arguments.workers} workers a side\n")
    columns = (
        "queries",
        "pairs",
        "right",
        "official, ms a pair",
        "first",
        "again",
        "ratio first",
        "ratio again",
        "aim",
    )
    print(f"| {' | '.join(columns)} |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="execplan-bench-") as name:
        folder, rng = Path(name), random.Random(0)
        if arguments.questions is not None and arguments.databases is not None:
            print(
                measure(
                    real(arguments.questions, arguments.databases, arguments.samples),
                    arguments.workers,
                    arguments.rounds,
                )
            )
            return 0
        for heavy in (False, True):
            questions = max(1, arguments.pairs // arguments.samples // (10 if heavy else 1))
            workload = generated(folder, heavy, questions, arguments.samples, rng)
            print(measure(workload, arguments.workers, arguments.rounds), flush=True)
        if arguments.episodes:
            (folder / "harness").mkdir()
            print(f"\n{harness(folder / 'harness', arguments.workers, arguments.episodes)}")
    return 0


if __name__ == "__main__":
    run_main(main)
