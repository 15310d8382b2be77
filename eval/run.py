"""Evaluate a model as a SQL agent: `python -m eval.run --model DIR_OR_ID --benchmark NAME --out DIR`.

Everything is checked before a model is loaded. Gold queries run first, then every question is one
episode, and its answer is scored as soon as it is there. DIR gets run.json, episodes.jsonl and, at the
end, summary.json (see `eval.records`). Run the same command again to go on where a killed run stopped.
"""

import hashlib
import platform
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from queue import SimpleQueue
from typing import Any

from eval.benchmarks import ScoreResults, load_benchmark, scorer_of
from eval.config import EvalConfig, parse_arguments
from eval.engines import Prepared, prepare_engine
from eval.gold import EXCLUSION_RULE, GoldBook, describe
from eval.preview import shown_results
from eval.progress import Progress, print_summary
from eval.records import RunFolder, episode_key
from eval.scorers.bird import execute
from eval.summary import summarize
from shared.chat import ChatCodec
from shared.cli import run_main
from shared.data.example import Example
from shared.engines.base import Engine
from shared.episode import EpisodeRecord
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.protocol import PROMPT_SHA256

Line = tuple[dict[str, Any], dict[str, Any]]


def question_seed(seed: int, question_id: str, sample: int = 0) -> int:
    """The seed of one episode: depends on the run's seed and the question, not on its place in the file."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{question_id}/{sample}".encode()).digest()[:6], "big")


def data_sha256(benchmark: str, examples: Sequence[Example]) -> str:
    """Identity of what was asked of what: questions, evidence, golds, and the content of the databases."""
    digest = hashlib.sha256(benchmark.encode())
    for e in sorted(examples, key=lambda e: e.question_id):
        fields = (e.question_id, e.db_id, e.question, e.evidence, e.gold_sql, e.database.content_hash)
        for text in fields:
            data = text.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def run_identity(config: EvalConfig, benchmark: str, examples: Sequence[Example], prepared: Prepared) -> dict[str, Any]:
    """Everything that determines a run's result. A run resumes only where all of it is unchanged."""
    budgets = asdict(config.episode())
    for key in ("mode", "sampling"):
        del budgets[key]
    sampling = config.sampling()
    return {
        "engine": config.engine,
        **({"engine_settings": dict(prepared.settings)} if prepared.settings else {}),
        "model": config.model,
        "model_sha256": prepared.sha256,
        "benchmark": benchmark,
        "questions": len(examples),
        "data_sha256": data_sha256(benchmark, examples),
        "mode": config.mode,
        "seed": config.seed,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k},
        "budgets": budgets,
        "limits": {"query_seconds": config.query_seconds, "gold_seconds": config.gold_seconds},
        "dtype": config.dtype,
        "prompt_sha256": PROMPT_SHA256,
        "template_sha256": prepared.codec.template_sha256,
        "exclusion_rule": EXCLUSION_RULE,
        "versions": {
            "execplan": _own_version(),
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            **prepared.versions,
        },
    }


def _own_version() -> str:
    try:
        return version("execplan")
    except PackageNotFoundError:
        return "source"


class Judge:
    """Turns a finished episode into its record: executes the answer, holds it against the gold."""

    def __init__(self, config: EvalConfig, sandbox: Sandbox, golds: GoldBook, score_results: ScoreResults):
        self._sandbox, self._golds, self._score_results = sandbox, golds, score_results
        self._limits = Limits(seconds=config.query_seconds)

    def line(self, example: Example, episode: EpisodeRecord) -> Line:
        """The episode's record and, apart from it, its timing. SetupError when the database is at fault."""
        gold = self._golds.gold(example)
        judged: dict[str, Any] = {"status": gold.status, "reason": gold.message, "scores": None, "results": None}
        seconds = 0.0
        if episode.ended == "error":
            last = (episode.error or "unknown").strip().splitlines()[-1]
            judged |= {"status": "harness_error", "reason": last}
        elif gold.usable:
            gold_result = self._golds.result(example)
            gold = describe(gold_result)  # a gold that had to run again may fail this time
            judged |= {"status": gold.status, "reason": gold.message}
            if gold.usable:
                pred = None
                if episode.answer_sql is not None:
                    pred = execute(self._sandbox, example.database, episode.answer_sql, self._limits)
                    seconds = pred.seconds
                scores = self._score_results(pred, gold_result)
                judged |= {"status": "scored", "reason": scores.official.reason, "scores": scores.to_json()}
                judged["results"] = shown_results(pred, gold_result)
        # Without the token lists first: asdict copies them one by one, which takes longer than the rest together.
        data = replace(episode, ids=[], mask=[], logprobs=[]).to_json(tokens=False)
        call_seconds = [[call.pop("seconds") for call in turn["calls"]] for turn in data["turns"]]
        timing = {"question_id": example.question_id, "sample": 0, "answer": seconds, "calls": call_seconds}
        record = {
            "question_id": example.question_id,
            "sample": 0,
            "db_id": example.db_id,
            "database_sha256": example.database.content_hash,
            "difficulty": example.difficulty,
            "question": example.question,
            "evidence": example.evidence,
            "gold_sql": example.gold_sql,
            "gold": gold.to_json(),
            **judged,
            "truncated": episode.truncated,
            "sampled_tokens": sum(episode.mask),
            "total_tokens": len(episode.ids),
        }
        return record | {key: value for key, value in data.items() if key not in record}, timing


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """Run the evaluation that `config` describes and return its summary. SetupError for anything the user can mend."""
    questions = load_benchmark(config)
    benchmark, examples = questions.benchmark, questions.examples
    prepared = prepare_engine(config)
    identity = run_identity(config, benchmark, examples, prepared)
    folder = RunFolder(config.folder(), identity)
    lines = folder.done()
    done = {episode_key(line) for line in lines}
    waiting = [example for example in examples if (example.question_id, 0) not in done]
    with Sandbox(workers=config.workers) as sandbox, Progress() as progress:
        golds = GoldBook(sandbox, Limits(seconds=config.gold_seconds))
        with progress.stage("gold queries", GoldBook.count(waiting)) as stage:
            golds.prepare(waiting, config.workers, stage.advance)
        for reason, count in questions.left_out.items():
            progress.note(f"{count} questions left out: {reason}")
        if done:
            progress.note(f"resuming: {len(done)} of {len(examples)} episodes are done")
        progress.note("loading the model" if config.engine in ("hf", "vllm") else f"engine: {config.engine}")
        engine = prepared.load() if waiting else None
        folder.open(
            {
                "left_out": dict(questions.left_out),
                "source": config.source(),
                "resources": {"concurrency": config.concurrency, "workers": config.workers},
            }
        )
        judge = Judge(config, sandbox, golds, scorer_of(benchmark))
        try:
            if engine is not None:
                with progress.stage(f"{benchmark}, {config.mode}", len(examples), lines) as stage:
                    for record, timing in _episodes(config, waiting, engine, prepared.codec, sandbox, judge):
                        folder.append(record, timing)
                        lines.append(record)
                        stage.advance(record)
        except KeyboardInterrupt:
            progress.note(f"{len(lines)} of {len(examples)} episodes are saved in {folder.path}: run again to go on")
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
    config: EvalConfig, examples: Sequence[Example], engine: Engine, codec: ChatCodec, sandbox: Sandbox, judge: Judge
) -> Iterator[Line]:
    """Run one episode an example and judge each in a thread, so that the engine never waits for a scored query."""
    tasks = [Task(example, question_seed(config.seed, example.question_id)) for example in examples]
    judged: SimpleQueue[Future[Line]] = SimpleQueue()
    pending = 0
    with ThreadPoolExecutor(config.workers, thread_name_prefix="judge") as pool:
        for index, episode in run_episodes(
            tasks,
            engine,
            codec,
            sandbox,
            config.episode(),
            concurrency=config.concurrency,
            tool_threads=config.workers,
            # These two batch by themselves; waiting would only leave them idle.
            wait_for_tools=config.engine not in ("vllm", "openai"),
        ):
            pool.submit(judge.line, tasks[index].example, episode).add_done_callback(judged.put)
            pending += 1
            while not judged.empty():
                pending -= 1
                yield judged.get().result()
        for _ in range(pending):
            yield judged.get().result()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Exit code 1 when the harness failed on some episode."""
    config = parse_arguments(argv)
    summary = evaluate(config)
    print_summary(summary, config.folder())
    return 1 if any(item["status"] == "harness_error" for item in summary["excluded"]) else 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
