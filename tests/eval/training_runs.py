"""The folder of a training run with sampled episodes, made by the trainer's own functions and a scripted agent."""

from collections.abc import Sequence
from pathlib import Path

from shared.chat import ByteCodec
from shared.config import build_config, dump_config
from shared.data.bird import read_questions
from shared.engines.base import Request
from shared.engines.scripted import ScriptedEngine
from shared.sql.sandbox import Sandbox
from tests.eval.agents import mixed_turn
from train.config import TrainConfig
from train.log import write_lines
from train.pool import build_pool
from train.rollout import Question, Scorer, episode_lines, run_groups, score_groups


def write_training_run(
    data: Path, run: Path, steps: Sequence[int] = (0, 25), questions: int = 7, candidates: int = 3
) -> Path:
    """Sample `steps` on the questions of `data` (as `tests.eval.hostile.write_hostile` leaves them) into `run`."""
    config = build_config(
        {
            "output": str(run),
            "model": {"path": "m"},
            "data": {"benchmark": "toy"},
            "rollout": {"questions": questions, "candidates": candidates, "max_turns": 4, "max_tokens": 9000},
        },
        TrainConfig,
        "test",
    )
    pool = build_pool(read_questions(data / "questions.json", data / "databases").examples)
    # The hostile questions have the shortest golds: they are the first.
    asked = [
        Question(i, pool.examples[i], float(pool.quantiles[i]), "full" if i % 2 else "withheld")
        for i in range(questions)
    ]
    codec = ByteCodec()

    def say(request: Request) -> str:
        return mixed_turn(request, f"{step}/{request.session}")

    with Sandbox(workers=1) as sandbox:
        for step in steps:
            engine = ScriptedEngine(codec, say, "w")
            episodes = run_groups(asked, step, config, engine, codec, sandbox)
            groups = score_groups(asked, episodes, Scorer(config, sandbox), 1)
            write_lines(run / "episodes" / f"step-{step:06d}.jsonl", episode_lines(groups, step))
    (run / "config.yaml").write_text(dump_config(config))
    return run
