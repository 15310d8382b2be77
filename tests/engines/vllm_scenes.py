"""Scenes that one loaded vLLM engine plays, in a process of their own: `python -m tests.engines.vllm_scenes MODEL OUT`.

vLLM changes the process it is loaded into (threads, environment, loggers), and a load takes most of the time; so the
tests run this once and look at what it wrote to OUT.
"""

import dataclasses
import json
import os
import random
import socket
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from eval import run
from eval.config import parse_arguments
from eval.engines import Prepared, prepare_engine
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Completion, Engine, Request, SamplingParams
from shared.engines.vllm import VLLMEngine
from shared.episode import EpisodeConfig
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Sandbox

MAX_LEN = 4096
VOCABULARY = 400
JSON = dict[str, Any]
OUTWARD: list[str] = []
_connect = socket.socket.connect


def _noting(self: socket.socket, address: Any) -> None:
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(("127.", "::1")):
        OUTWARD.append(str(address))
        raise OSError("no network in tests")
    _connect(self, address)


def main(model: Path, out: Path) -> None:
    # Nothing of vLLM is imported yet.
    socket.socket.connect = _noting  # type: ignore[method-assign,assignment]
    affinity = os.sched_getaffinity(0)
    config = parse_arguments(["--engine", "vllm", "--model", str(model), "--max-tokens", str(MAX_LEN)])
    unfit = unfit_settings(model)
    prepared = prepare_engine(config)
    engine = prepared.load()
    found: JSON = {
        "unfit": unfit,
        "versions": dict(prepared.versions),
        "sha256": prepared.sha256,
        "sessions": sessions(engine),
        "greedy": [one(engine, f"greedy{i}", ids(i, 60 + i), sampling(0.0, 40)) for i in range(6)],
        "stops": stops(engine),
        "seeds": [seeded(engine, seed) for seed in (1, 1, 2)],
        "long": long_prompts(engine),
        "aborted": aborted(engine),
        "refused": refused(engine),
        "episodes": episodes(engine, prepared.codec),
        "evaluation": evaluation(engine, prepared, model, out.parent),
    }
    found["outward"] = OUTWARD
    found["same_cores"] = os.sched_getaffinity(0) == affinity
    found["environment"] = {key: value for key, value in os.environ.items() if "TRACK" in key or "USAGE" in key}
    out.write_text(json.dumps(found), encoding="utf-8")


def ids(seed: int, count: int) -> list[int]:
    """A prompt of random ids."""
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(count)]


def sampling(temperature: float, max_tokens: int, seed: int = 0, stops: tuple[int, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature, 1.0, 0, max_tokens, seed, stops)


def told(prompt: list[int], completion: Completion) -> JSON:
    """A completion with its prompt, as JSON."""
    return dataclasses.asdict(completion) | {"prompt": prompt}


def drain(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(10_000):
        if not engine.has_work():
            return done
        done |= {completion.request_id: completion for completion in engine.step()}
    raise AssertionError("the engine does not finish")


def one(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> JSON:
    engine.add(Request(name, tuple(prompt), params))
    return told(prompt, drain(engine)[name])


def sessions(engine: Engine) -> JSON:
    """Ten sessions of three turns, one of them slow; each next turn is added as soon as its last one is there."""
    contexts = {f"s{i}": ids(i, 20 + 13 * i) for i in range(10)}
    turns: dict[str, list[JSON]] = {name: [] for name in contexts}
    order: list[str] = []

    def ask(name: str) -> None:
        length = 200 if name == "s0" else 8
        params = sampling(1.0, length, seed=2**64 - 1 - len(order))
        engine.add(Request(f"{name}#{len(turns[name])}", tuple(contexts[name]), params, session=name))

    for name in contexts:
        ask(name)
    while engine.has_work():
        for completion in engine.step():
            name = completion.request_id.partition("#")[0]
            order.append(completion.request_id)
            turns[name].append(told(list(contexts[name]), completion))
            # What a tool would have said.
            contexts[name] += [*completion.token_ids, *ids(len(order), 30)]
            if len(turns[name]) < 3:
                ask(name)
            else:
                engine.end_session(name)
    return {"order": order, "turns": turns}


def stops(engine: Engine) -> list[JSON]:
    """Requests of which half of the vocabulary is a stop."""
    half = tuple(range(VOCABULARY // 2))
    return [one(engine, f"stop{i}", ids(i, 30), sampling(1.0, 12, seed=i, stops=half)) for i in range(6)]


def seeded(engine: Engine, seed: int) -> JSON:
    return one(engine, f"seed{seed}", ids(0, 50), sampling(1.0, 24, seed=seed))


def long_prompts(engine: Engine) -> list[JSON]:
    """More prompt tokens at once than a step takes, each request with a seed of its own."""
    prompts = {f"long{i}": ids(i, 3000) for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(Request(name, tuple(prompt), sampling(1.0, 4, seed=i)))
    done = drain(engine)
    return [told(prompt, done[name]) for name, prompt in prompts.items()]


def aborted(engine: Engine) -> JSON:
    """Two requests of an episode that ends, one of another."""
    for name, session in (("a#0", "a"), ("a#1", "a"), ("b#0", "b")):
        engine.add(Request(name, (1, 2, 3), sampling(1.0, 30), session=session))
    engine.step()
    engine.end_session("a")
    return {"finished": sorted(drain(engine)), "idle": engine.step() == [] and not engine.has_work()}


def refused(engine: Engine) -> list[str]:
    messages = []
    for prompt, length in (((), 4), ((1,), 0), ((1,) * (MAX_LEN - 3), 4)):
        try:
            engine.add(Request("r", prompt, sampling(1.0, length)))
        except ValueError as error:
            messages.append(str(error))
    return messages


def unfit_settings(model: Path) -> list[str]:
    """What vLLM says of settings that no model can have, as the user reads it."""
    messages = []
    for settings in ({"max_model_len": 10**7}, {"no_such_argument": 1}):
        try:
            VLLMEngine(model, **settings)
        except SetupError as error:
            messages.append(str(error))
    return messages


def write_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE item (id INTEGER, name TEXT); INSERT INTO item VALUES (1, 'ant');")
    connection.close()


def evaluation(engine: Engine, prepared: Prepared, model: Path, folder: Path) -> JSON:
    """A whole evaluation with the loaded engine, which it closes."""
    (folder / "databases" / "shop").mkdir(parents=True)
    write_database(folder / "databases" / "shop" / "shop.sqlite")
    questions = [{"db_id": "shop", "question": f"Question {i}?", "query": "SELECT name FROM item"} for i in range(3)]
    (folder / "questions.json").write_text(json.dumps(questions))
    where = ["--questions", str(folder / "questions.json"), "--databases", str(folder / "databases")]
    budget = ["--max-turns", "2", "--max-new-tokens", "12", "--max-tokens", str(MAX_LEN)]
    config = parse_arguments([*where, *budget, "--engine", "vllm", "--model", str(model), "--out", str(folder / "run")])
    with patch.object(run, "prepare_engine", lambda _: dataclasses.replace(prepared, load=lambda: engine)):
        return run.evaluate(config)


def episodes(engine: Engine, codec: Any) -> list[JSON]:
    """Whole episodes through the runner."""
    with tempfile.TemporaryDirectory() as folder, Sandbox(workers=1) as sandbox:
        path = Path(folder) / "shop.sqlite"
        write_database(path)
        examples = [Example(f"q{i}", "shop", f"Question {i}?", "SELECT 1", Database("shop", path)) for i in range(5)]
        config = EpisodeConfig(mode="full", max_turns=3, max_new_tokens=16, max_tokens=MAX_LEN)
        tasks = [Task(example, seed=i) for i, example in enumerate(examples)]
        records = run_episodes(tasks, engine, codec, sandbox, config, concurrency=3)
        return [record.to_json() for _, record in records]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
