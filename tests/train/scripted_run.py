"""A GRPO run whose episodes follow a script: the loop, the trainer and the files are real, the sampling is not.

As a program (`python scripted_run.py FOLDER key=value …`) it is what the tests kill and resume.
"""

import json
import os
import sqlite3
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shared.config import build_config, parse_overrides
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Completion, Request
from train import loop, state, trainer
from train.batch import TrainRow, collate
from train.config import TrainConfig
from train.logprobs import LogprobModel
from train.loop import run_training
from train.model import Policy, load_model
from train.optim import Optimizers
from train.pool import Pool, build_pool
from train.rollout import Scorer
from train.sharding import WholeCopy, is_sharded
from train.stopping import StopFlag
from train.trainer import Trainer
from train.validation import HeldOut


class ScriptedPolicy:
    """Says, by the seed, a right, a wrong, a failing or no answer; log-probs are the trainer's own plus `gap`."""

    batches_by_itself = False

    def __init__(self, policy: Policy, trainer: Trainer, gap: float = 0.0, weights: str = "") -> None:
        self.policy, self.trainer, self.gap, self.weights = policy, trainer, gap, weights
        self.queue: list[Request] = []
        self.copy: WholeCopy | None = None
        if is_sharded(trainer.model):
            self.copy = WholeCopy(trainer.model, load_model(trainer.config.model), trainer.device)

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def step(self) -> list[Completion]:
        queue, self.queue = self.queue, []
        turns = [self.policy.codec.turn_ids(self._text(request)) for request in queue]
        rows = [
            TrainRow(
                [*r.prompt_ids, *ids],
                [0] * len(r.prompt_ids) + [1] * len(ids),
                [0.0] * (len(r.prompt_ids) + len(ids)),
                0.0,
            )
            for r, ids in zip(queue, turns, strict=True)
        ]
        values = [row.tolist() for row in self._logprobs(rows)]
        weights = self.weights or self.trainer.weights
        return [
            Completion(r.request_id, tuple(ids), tuple(v + self.gap for v in value[-len(ids) :]), "stop", weights)
            for r, ids, value in zip(queue, turns, values, strict=True)
        ]

    @torch.no_grad()
    def _logprobs(self, rows: Sequence[TrainRow]) -> list[torch.Tensor]:
        if self.copy is None:
            return self.trainer.logprobs(rows)
        model, batches = LogprobModel(self.copy.model), [collate([row]) for row in rows]
        return [model(batch.ids, batch.mask)[0] for batch in batches]

    def _text(self, request: Request) -> str:
        example: Example = request.context["example"]
        if os.environ.get("SCRIPTED_SILENT_RANK") == os.environ.get("RANK", "0"):
            return "I cannot"
        if request.context["turn"] == 0 and request.params.seed % 3:
            return 'look</think>{"tool": "list_tables"}'
        choice = request.params.seed % 5
        if choice == 4:
            return "I cannot"
        sql = [example.gold_sql, example.gold_sql, "SELECT id FROM item", "SELECT nothing FROM nowhere"][choice]
        return "so</think>" + json.dumps({"tool": "submit_sql", "args": {"sql": sql}})

    def has_work(self) -> bool:
        return bool(self.queue)

    def end_session(self, session: str) -> None:
        pass

    def refresh(self) -> None:
        if self.copy is not None:
            self.copy.refresh()

    def reset(self) -> None:
        self.queue = []

    def close(self) -> None:
        pass


def shop_pool(folder: Path, n: int = 24) -> Pool:
    """Questions of rising gold length over one small database; some golds are equal in length, one is empty."""
    path = folder / "shop.sqlite"
    if not path.exists():
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL)")
            connection.executemany(
                "INSERT INTO item VALUES (?, ?, ?)", [(1, "ant", 1.5), (2, "bee", 2.25), (3, None, 3)]
            )
    database = Database("shop", path=path)
    golds = [f"SELECT name FROM item WHERE id > 0{' AND id < 9' * (i // 2)}" for i in range(n - 1)]
    golds.append("SELECT name FROM item WHERE id > 9")
    return build_pool([Example(f"q{i:02}", "shop", f"question {i}?", sql, database) for i, sql in enumerate(golds)])


def make_config(folder: Path, model: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A small run on the CPU; `overrides` as on the command line."""
    data: dict[str, object] = {
        "output": str(folder / "run"),
        "steps": 5,
        "device": "cpu",
        "sample_episodes_every": 2,
        "model": {"path": str(model)},
        "data": {"benchmark": "toy"},
        "rollout": {"questions": 6, "candidates": 4, "max_turns": 2, "max_tokens": 8000, "max_new_tokens": 300},
        "curriculum": {"ramp_steps": 4},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"every": 2},
    }
    for key, value in parse_overrides(overrides, {}).items():
        *sections, last = key.split(".")
        target = data
        for section in sections:
            target = target.setdefault(section, {})  # type: ignore[assignment]
        target[last] = value
    return build_config(data, TrainConfig, "test")


def run(config: TrainConfig, folder: Path, gap: float = 0.0, weights: str = "") -> int:
    """Train (or continue) with the scripted policy; the exit code."""
    stop = StopFlag(config.output)
    pool = shop_pool(folder)
    held_out = None
    if config.validation.every:
        asked = [replace(example, question_id=f"h{i}") for i, example in enumerate(pool.examples[:5])]
        held_out = HeldOut("the shop", asked, 60, "key")
    with stop.installed():
        return run_training(
            config, pool, stop, lambda policy, trainer: ScriptedPolicy(policy, trainer, gap, weights), held_out
        )


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def finish(folder: Path, model: Path, *overrides: str, **more: Any) -> list[dict[str, Any]]:
    """Run to the end, which must be reached; the metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    assert run(make_config(folder, model, overrides), folder, **more) == 0
    return metrics(folder)


def assert_same_run(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Equal questions, rewards and weights, bit by bit, step by step."""
    keys = ("step", "questions", "quantile", "reward", "weights", "kl_coefficient", "lr")
    assert [{key: line.get(key) for key in keys} for line in ours] == [
        {key: line.get(key) for key in keys} for line in theirs
    ]


# Where each phase of a run spends its time, as (owner, function); each is entered once a step or more often.
PHASES: dict[str, tuple[Any, str]] = {
    "rollout": (ScriptedPolicy, "step"),
    "scoring": (Scorer, "score"),
    "sync": (ScriptedPolicy, "refresh"),
    "update": (Optimizers, "step"),
    "evaluation": (loop, "ask"),
    "saving": (state, "save_policy"),
}


def signal_yourself(phase: str, number: int, times: int) -> None:
    """Have this process send itself `times` signals when it next enters the phase, after a step of its own at least."""
    owner, name = PHASES[phase]
    function, before = getattr(owner, name), Trainer.update
    updates = 0

    def update(*arguments: Any, **more: Any) -> Any:
        nonlocal updates
        updates += 1
        return before(*arguments, **more)

    def entered(*arguments: Any, **more: Any) -> Any:
        nonlocal times
        while updates and times:
            times -= 1
            os.kill(os.getpid(), number)
        return function(*arguments, **more)

    setattr(Trainer, "update", update)  # noqa: B010 (a method is replaced, which types don't allow)
    setattr(owner, name, entered)


def count_collectives(file: Path) -> None:
    """Write down, one name a line, each collective call that this process makes through accelerate's helpers."""
    for module in (loop, trainer):
        for name in ("gather_object", "broadcast_object_list"):
            if (function := getattr(module, name, None)) is not None:
                setattr(module, name, _counted(function, name, file))


def _counted(function: Any, name: str, file: Path) -> Any:
    def call(*arguments: Any, **more: Any) -> Any:
        with file.open("a") as lines:
            lines.write(name + "\n")
        return function(*arguments, **more)

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    target = Path(sys.argv[1])
    if folder := os.environ.get("COUNT_COLLECTIVES"):
        count_collectives(Path(folder) / f"rank-{os.environ.get('RANK', '0')}")
    if (wish := os.environ.get("SCRIPTED_SIGNAL")) and os.environ["SIGNALLED_RANK"] == os.environ.get("RANK", "0"):
        place, how, often = wish.split()
        signal_yourself(place, int(how), int(often))
    sys.exit(run(make_config(target, Path(sys.argv[2]), sys.argv[3:]), target))
