"""One of two ranks that roll out with vLLM: `torchrun … -m tests.train.vllm_ranks FOLDER OUT PARALLEL key=value …`.

FOLDER holds `base`, a tiny base with shapes that vLLM takes; PARALLEL is the config's key, the others are of its
section `rollout`. Each rank writes what it saw to OUT/rank-N.json.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate import PartialState

from shared.config import parse_overrides
from tests.train.vllm_sync_scenes import greedy, make_config, paying
from train import loop
from train.live import live_tensors
from train.model import Policy
from train.pool import load_pool
from train.rollout import Group, check_weights
from train.rollout_engines import RolloutEngine, SyncedEngine, make_rollout_engine
from train.servers import ServerSync
from train.stopping import StopFlag
from train.trainer import Trainer
from train.weight_sync import WeightSync, checksum

JSON = dict[str, Any]


def main(folder: Path, out: Path, parallel: str, overrides: Sequence[str]) -> None:
    config = make_config(folder, **parse_overrides(overrides, {}))
    config = config.model_copy(update={"output": out / "run", "parallel": parallel})
    rank = int(os.environ["RANK"])
    found: JSON = {"steps": [], "proofs": []}

    def checked(groups: Sequence[Group], expected: str) -> None:
        """What this rank sampled in a step, noted where the run checks its fingerprints."""
        found["steps"].append(
            {
                "questions": [group.question.example.question_id for group in groups],
                "episodes": [len(group.episodes) for group in groups],
                "weights": sorted({name for group in groups for record in group.episodes for name in record.weights}),
                "expected": expected,
            }
        )
        check_weights(groups, expected)

    prove, load = WeightSync.prove, ServerSync._load

    def proven(self: WeightSync) -> None:
        prove(self)
        found["proofs"].append(len(self.pieces))

    def loaded(self: ServerSync, *arguments: Any) -> None:
        load(self, *arguments)
        found["proofs"].append(len(self.pieces) * len(self.servers))

    def make(policy: Policy, trainer: Trainer) -> RolloutEngine:
        engine = make_rollout_engine(policy, trainer)
        close = engine.close

        def last() -> None:
            """What the engine says when the run has ended, and what one rank alone notices."""
            engine.refresh()
            found["greedy"] = greedy(engine)
            found["parameters"] = {n: str(checksum(t.value())) for n, t in live_tensors(policy.model).items()}
            found["fingerprint"] = trainer.weights
            # Under FSDP a proof is a collective of both ranks.
            if isinstance(engine, SyncedEngine) and rank == 1 and parallel == "ddp":
                found["perturbed"] = perturbed(engine)
            close()

        engine.close = last  # type: ignore[method-assign]
        return engine

    with (
        paying(),
        patch.object(loop, "check_weights", checked),
        patch.object(WeightSync, "prove", proven),
        patch.object(ServerSync, "_load", loaded),
    ):
        with PartialState(cpu=True).main_process_first():
            pool = load_pool(config.data, config.output, config.seed)
        found["code"] = loop.run_training(config, pool, StopFlag(config.output), make)
    (out / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def perturbed(engine: SyncedEngine) -> str:
    """One layer of this rank's engine is not what was loaded."""

    def perturb(model: Any) -> None:
        with torch.no_grad():
            model.language_model.model.layers[2].post_attention_layernorm.weight.add_(1.0)

    engine.engine.inspect(perturb)
    try:
        engine._sync.prove()
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
