"""Evaluate a model as a SQL agent: `python -m eval.run --model DIR_OR_ID --benchmark NAME --out DIR`.

Everything is checked before a model is loaded. Gold queries run first, then every question is one
episode, and its answer is scored as soon as it is there. DIR gets run.json, episodes.jsonl and, at the
end, summary.json (see `eval.records`). Run the same command again to go on where a killed run stopped.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from eval.benchmarks import Questions, load_benchmark
from eval.config import EvalConfig, parse_arguments
from eval.engines import Prepared, prepare_engine
from eval.goldcache import GoldCache, default_folder
from eval.identity import question_seed, run_identity
from eval.judge import Judge, Line, open_book
from eval.progress import Progress, print_summary
from eval.records import RunFolder, episode_key
from eval.summary import summarize
from shared.cli import run_main
from shared.engines.base import Engine
from shared.episode import EpisodeRecord
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Sandbox

Wanted = tuple[int, int]  # place of the example in the benchmark, sample number


Observer = Callable[[int, EpisodeRecord], None]  # sample number, and the episode with its tokens


def evaluate(
    config: EvalConfig, prepared: Prepared | None = None, observe: Observer = lambda sample, episode: None
) -> dict[str, Any]:
    """Run the evaluation that `config` describes and return its summary. SetupError for anything the user can mend.

    `prepared` takes the place of the engine that `config` names. `observe` sees each episode before it is judged, so
    that what it keeps of one is there when the episode's record is.
    """
    questions = load_benchmark(config)
    benchmark, examples = questions.benchmark, questions.examples
    prepared = prepared or prepare_engine(config)
    identity = run_identity(config, benchmark, examples, prepared)
    folder = RunFolder(config.folder(), identity)
    lines = folder.done()
    done = {episode_key(line) for line in lines}
    everything = [(i, k) for i in range(len(examples)) for k in range(config.sample_count())]
    waiting = [(i, k) for i, k in everything if (examples[i].question_id, k) not in done]
    with Sandbox(workers=config.workers) as sandbox, Progress() as progress, _stoppable(sandbox):
        cache = GoldCache(config.gold_cache or default_folder(), progress.note) if config.cache else None
        golds = open_book(config, benchmark, sandbox, cache)
        asked = [examples[i] for i in dict.fromkeys(i for i, _ in waiting)]
        with progress.stage("gold queries", golds.count(asked)) as stage:
            golds.prepare(asked, config.workers, stage.advance)
        for reason, count in questions.left_out.items():
            progress.note(f"{count} questions left out: {reason}")
        if done:
            progress.note(f"resuming: {len(done)} of {len(everything)} episodes are done")
        progress.note(prepared.description)
        engine = prepared.load() if waiting else None
        judge = Judge(config, sandbox, golds)
        try:
            folder.open(
                {
                    "left_out": dict(questions.left_out),
                    "source": config.source(),
                    "resources": {"concurrency": config.concurrency, "workers": config.workers},
                }
            )
            if engine is not None:
                with progress.stage(f"{benchmark}, {config.mode}", len(everything), lines) as stage:
                    for record, timing in _episodes(
                        config, questions, waiting, engine, prepared, sandbox, judge, observe
                    ):
                        folder.append(record, timing)
                        lines.append(record)
                        stage.advance(record)
        except (KeyboardInterrupt, SetupError):
            progress.note(f"{len(lines)} of {len(everything)} episodes are saved in {folder.path}: run again to go on")
            raise
        finally:
            folder.close()
            if engine is not None:
                engine.close()
    order = {example.question_id: place for place, example in enumerate(examples)}
    lines.sort(key=lambda line: (order[line["question_id"]], line["sample"]))
    summary = summarize(lines, identity)
    folder.finish(lines, summary)
    return summary


def _episodes(
    config: EvalConfig,
    questions: Questions,
    wanted: Sequence[Wanted],
    engine: Engine,
    prepared: Prepared,
    sandbox: Sandbox,
    judge: Judge,
    observe: Observer,
) -> Iterator[Line]:
    """Run the episodes and judge each in a thread, so that the engine never waits for a scored query."""
    examples = questions.examples
    tasks = [Task(examples[i], question_seed(config.seed, examples[i].question_id, k)) for i, k in wanted]
    judged: SimpleQueue[Future[Line]] = SimpleQueue()
    pending = 0
    episodes = run_episodes(
        tasks,
        engine,
        prepared.codec,
        sandbox,
        prepared.episode(config),
        concurrency=config.concurrency,
        tool_threads=config.workers,
    )
    stopped: SetupError | None = None
    with ThreadPoolExecutor(config.workers, thread_name_prefix="judge") as pool:
        try:
            for index, episode in episodes:
                task, sample = tasks[index], wanted[index][1]
                observe(sample, episode)
                pool.submit(judge.line, task.example, sample, episode).add_done_callback(judged.put)
                pending += 1
                while not judged.empty():
                    pending -= 1
                    yield judged.get().result()
        except SetupError as error:  # a server that died, say: what has ended before is kept
            stopped = error
        for _ in range(pending):
            yield judged.get().result()
    if stopped is not None:
        raise stopped


@contextmanager
def _stoppable(sandbox: Sandbox) -> Iterator[None]:
    """Have Ctrl-C and SIGTERM end the SQL that is under way: threads that wait for it would hold up the exit."""

    def stop(signum: int, frame: object) -> None:
        sandbox.abort()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are none of our business there
        yield
        return
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 1 when the harness failed on some episode."""
    config = parse_arguments(argv)
    summary = evaluate(config)
    print_summary(summary, config.folder())
    return 1 if any(item["status"] == "harness_error" for item in summary["excluded"]) else 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
