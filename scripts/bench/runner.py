"""Request-level running against lock-step, over an engine that only takes time.

    python scripts/bench/runner.py [--episodes 256] [--concurrency 64] [--speed 20]

The engine decodes nothing: each token of a batch of b sequences takes --base-ms + b * --sequence-ms, whatever it
says. How long a turn is and how long a tool call takes is drawn once, from a seeded distribution by episode and turn,
so all ways of running play the same episodes. Clocks run --speed times as fast as they would.

    lock-step    64 episodes at a time: all sample their turn, all run their tools, until the last of them has ended
    waiting      shared.runner, engine steps only when no tool is running (how the transformers engine is run)
    request      shared.runner, an episode asks again as soon as its tools are done (how vLLM and servers are run)

Idle is the share of the time in which the engine decodes nothing; the mean batch is over the time in which it does.
"""

import argparse
import hashlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.chat import ByteCodec
from shared.cli import run_main
from shared.data.example import Example
from shared.database import Database, Payload
from shared.engines.base import Completion, Request
from shared.engines.scripted import call_text
from shared.episode import Episode, EpisodeConfig, EpisodeRecord
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Limits, QueryResult, Sandbox
from shared.tools.executor import ToolExecutor

AIM = 1.5
TOKENS_A_STEP = 8
MEDIAN_TOKENS, TOKENS_SIGMA, MOST_TOKENS = 180.0, 0.7, 2048
MEDIAN_TOOL_SECONDS, TOOL_SIGMA, MOST_TOOL_SECONDS = 0.05, 1.2, 5.0
CONFIG = EpisodeConfig(max_tokens=1 << 31, max_new_tokens=1 << 30)
TOOL_THREADS = 16
LIMITS = Limits()


def drawn(name: str, median: float, sigma: float, most: float) -> float:
    """A log-normal number that belongs to `name`."""
    rng = random.Random(hashlib.sha256(name.encode()).digest())
    return min(median * math.exp(rng.gauss(0.0, sigma)), most)


@dataclass(frozen=True)
class Pace:
    """Seconds a token takes, by batch size, and how much faster than that the clock runs."""

    base: float
    sequence: float
    speed: float

    def sleep(self, seconds: float) -> None:
        """Let this much simulated time pass."""
        time.sleep(seconds / self.speed)


class SimulatedEngine:
    """Every request ends after its drawn number of tokens; `busy` and `batches` say how the time was spent."""

    batches_by_itself = True

    def __init__(self, codec: ByteCodec, pace: Pace) -> None:
        self._codec, self._pace = codec, pace
        self._left: dict[str, tuple[Request, float]] = {}
        self.busy = self.sequence_seconds = 0.0

    def add(self, request: Request) -> None:
        """Start decoding at the next step."""
        tokens = drawn(f"turn {request.request_id}", MEDIAN_TOKENS, TOKENS_SIGMA, MOST_TOKENS)
        self._left[request.request_id] = (request, max(tokens, 1.0))

    def step(self) -> list[Completion]:
        """A few tokens for every running sequence."""
        started, size = time.perf_counter(), len(self._left)
        self._pace.sleep(TOKENS_A_STEP * (self._pace.base + size * self._pace.sequence))
        taken = time.perf_counter() - started
        self.busy += taken
        self.sequence_seconds += taken * size
        done = []
        for name, (request, left) in list(self._left.items()):
            if left > TOKENS_A_STEP:
                self._left[name] = (request, left - TOKENS_A_STEP)
                continue
            del self._left[name]
            ids = tuple(self._codec.turn_ids(turn_text(request)))
            done.append(Completion(name, ids, (0.0,) * len(ids), "stop"))
        return done

    def has_work(self) -> bool:
        """True while a sequence is running."""
        return bool(self._left)

    def end_session(self, session: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is held."""


def turn_text(request: Request) -> str:
    """A query in each of two to six turns, then the answer."""
    turn, name = int(request.context["turn"]), request.session
    turns = 2 + int(drawn(f"turns {name}", 2.0, 0.5, 4.0))
    if turn + 1 >= turns or request.context["closing"]:
        return call_text("Submit.", "submit_sql", sql="SELECT 1")
    return call_text("Look.", "run_query", sql=f"SELECT '{name}', {turn}")


class SimulatedSandbox(Sandbox):
    """Queries take their drawn time and return one row."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def query(self, database: Database, sql: str, limits: Limits = LIMITS, **options: Any) -> QueryResult:
        """One row, after a while."""
        self._pace.sleep(drawn(f"tool {sql}", MEDIAN_TOOL_SECONDS, TOOL_SIGMA, MOST_TOOL_SECONDS))
        return QueryResult("ok", ("one",), [(1,)])


def lock_step(
    tasks: Sequence[Task], engine: SimulatedEngine, codec: ByteCodec, sandbox: Sandbox, concurrency: int
) -> Iterator[tuple[int, EpisodeRecord]]:
    """All episodes of a group take their turn together."""
    with ThreadPoolExecutor(TOOL_THREADS) as pool:
        for start in range(0, len(tasks), concurrency):
            group = {}
            for index, task in enumerate(tasks[start : start + concurrency], start):
                executor, name = ToolExecutor(task.example.database, sandbox), f"{index}:{task.example.question_id}"
                group[name] = (index, Episode(task.example, executor, codec, CONFIG, seed=task.seed, name=name))
            requests = [request for _, episode in group.values() if (request := episode.next_request())]
            while requests:
                for request in requests:
                    engine.add(request)
                completions: list[Completion] = []
                while engine.has_work():
                    completions += engine.step()
                episodes = [group[c.request_id.rpartition("#")[0]][1] for c in completions]
                list(pool.map(lambda pair: pair[0].accept(pair[1]), zip(episodes, completions, strict=True)))
                requests = [request for episode in episodes if (request := episode.next_request())]
            yield from ((index, episode.record()) for index, episode in group.values())


@dataclass(frozen=True)
class Measured:
    """One way of running, in simulated seconds."""

    name: str
    seconds: float
    idle: float
    batch: float
    answers: tuple[tuple[int, str], ...]


def measure(name: str, tasks: Sequence[Task], concurrency: int, pace: Pace) -> Measured:
    """Run all tasks one way."""
    codec = ByteCodec()
    engine = SimulatedEngine(codec, pace)
    with SimulatedSandbox(pace) as sandbox:
        runs: dict[str, Callable[[], Iterator[tuple[int, EpisodeRecord]]]] = {
            "lock-step": lambda: lock_step(tasks, engine, codec, sandbox, concurrency),
            **{
                way: lambda way=way: run_episodes(  # type: ignore[misc]
                    tasks,
                    engine,
                    codec,
                    sandbox,
                    CONFIG,
                    concurrency=concurrency,
                    tool_threads=TOOL_THREADS,
                    wait_for_tools=way == "waiting",
                )
                for way in ("waiting", "request")
            },
        }
        started = time.perf_counter()
        records = dict(runs[name]())
        seconds = time.perf_counter() - started
    answers = tuple((i, str([turn.text for turn in records[i].turns])) for i in sorted(records))
    batch = engine.sequence_seconds / engine.busy if engine.busy else 0.0
    return Measured(name, seconds * pace.speed, 1 - engine.busy / seconds, batch, answers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--speed", type=float, default=20.0, help="how many times as fast the clock runs")
    parser.add_argument("--base-ms", type=float, default=8.0, help="of a decoding step, whatever the batch")
    parser.add_argument("--sequence-ms", type=float, default=0.15, help="of a decoding step, for each sequence")
    arguments = parser.parse_args(argv)
    pace = Pace(arguments.base_ms / 1000, arguments.sequence_ms / 1000, arguments.speed)
    database = Database("none", payload=Payload("CREATE TABLE t (a INT);", "{}"))
    tasks = [Task(Example(f"q{i}", "none", "?", "SELECT 1", database)) for i in range(arguments.episodes)]
    print(f"{arguments.episodes} episodes, {arguments.concurrency} at a time\n")
    print("| way | seconds | episodes a second | against lock-step | idle | mean batch |")
    print("|---|---|---|---|---|---|")
    first: Measured | None = None
    for name in ("lock-step", "waiting", "request"):
        one = measure(name, tasks, arguments.concurrency, pace)
        first = first or one
        if one.answers != first.answers:
            raise RuntimeError(f"{name} played other episodes than {first.name}")
        print(
            f"| {name} | {one.seconds:.1f} | {len(tasks) / one.seconds:.2f} | {first.seconds / one.seconds:.2f} "
            f"| {one.idle:.1%} | {one.batch:.1f} |",
            flush=True,
        )
    print(f"\nAim: request-level at least {AIM} times as many episodes a second as lock-step.")
    return 0


if __name__ == "__main__":
    run_main(main)
