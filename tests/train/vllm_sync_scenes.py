"""What happens to the weights of one vLLM engine in a run: `python -m tests.train.vllm_sync_scenes FOLDER OUT`.

In a process of its own, as tests/engines/vllm_scenes.py. FOLDER holds `base`, a tiny base with shapes that vLLM takes.
A run of two steps comes first, with the command's own parts; the scenes then go on with its policy and its engine.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shared.config import build_config
from shared.data.example import Example
from shared.engines import vllm_weights
from shared.engines.base import Request, SamplingParams
from shared.engines.vllm import VLLMEngine, can_sleep
from tests.engines.tiny_export import export
from tests.engines.vllm_scenes import drain, ids
from train import loop
from train.batch import TrainRow
from train.config import TrainConfig
from train.model import Policy, save_policy
from train.pool import load_pool
from train.reward import Score
from train.rollout import Scorer
from train.rollout_engines import SyncedEngine, check_rollout_engine, vllm_engine
from train.stopping import StopFlag
from train.trainer import Trainer
from train.weight_sync import WeightSync, fingerprint

JSON = dict[str, Any]
PROMPTS = [tuple(ids(i, 30 + 7 * i)) for i in range(5)]
MAX_LEN, CONCURRENCY = 600, 8


def make_config(folder: Path, **rollout: Any) -> TrainConfig:
    """Two steps on toy questions with vLLM."""
    data: JSON = {
        "output": str(folder / "run"),
        "steps": 2,
        "device": "cpu",
        "model": {"path": str(folder / "base")},
        "data": {"benchmark": "toy", "toy_databases": 4, "toy_questions": 24},
        "reward": {"group_filter": "off"},
        "rollout": {
            "questions": 2,
            "candidates": 3,
            "engine": "vllm",
            "max_turns": 2,
            "max_new_tokens": 24,
            "max_tokens": MAX_LEN,
            "concurrency": CONCURRENCY,
        }
        | rollout,
        "optimizer": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": 2},
        "gate": {"mean_gap": 0.05},
    }
    return build_config(data, TrainConfig, "test")


@contextmanager
def paying() -> Iterator[None]:
    """Candidates earn 0, 1, 2, 0, …: of a model that knows nothing every step still learns something."""

    def score(self: Scorer, example: Example, answers: Sequence[str | None]) -> list[Score]:
        return [Score(float(i % 3), "invalid", False, 0.0, 0.0, 0.0, 0.0) for i in range(len(answers))]

    with patch.object(Scorer, "score", score):
        yield


class Kept(SyncedEngine):
    """Outlives the run that it was made for."""

    def close(self) -> None:
        self.reset()


def main(folder: Path, out: Path) -> None:
    config = make_config(folder)
    check_rollout_engine(config)
    kept: list[tuple[Policy, Trainer, SyncedEngine]] = []

    def make(policy: Policy, trainer: Trainer) -> SyncedEngine:
        engine = vllm_engine(policy, trainer)
        engine.__class__ = Kept
        kept.append((policy, trainer, engine))
        return engine

    pool = load_pool(config.data, config.output, config.seed)
    with paying():
        code = loop.run_training(config, pool, StopFlag(config.output), make)
    policy, trainer, engine = kept[0]
    found: JSON = {"code": code, "run_syncs": engine.syncs, "run_weights": trainer.weights}
    found["pieces"] = len(engine._sync.pieces)
    found["names"] = engine._sync.names
    found["can_sleep"] = can_sleep()
    found["sleep"] = refusal(lambda: check_rollout_engine(make_config(folder, vllm={"sleep": True})))
    found |= {"before": greedy(engine), "last_syncs": engine.syncs}
    found |= {"again": greedy(engine), "unchanged_syncs": engine.syncs}

    change(policy, trainer, 0.02)
    found |= {"changed_weights": trainer.weights, "changed": greedy(engine), "changed_syncs": engine.syncs}
    found["step"] = gate(engine, trainer)
    found["under_running"] = refusal(lambda: change_while_running(policy, trainer, engine))
    found["updated"] = greedy(engine)

    found["poisoned"] = poisoned(policy, trainer, engine)
    found["stale_head"] = stale_head(policy, trainer, engine)
    found["perturbed"] = perturbed(trainer, engine)
    change(policy, trainer, 0.02)
    found["last"] = greedy(engine)
    # A closed engine takes vLLM's process groups with it, so this one, which is closed, comes last.
    found["fresh"] = fresh(policy, folder)
    out.write_text(json.dumps(found), encoding="utf-8")
    engine.close()


def change(policy: Policy, trainer: Trainer, size: float) -> None:
    """Every tensor of the trainer moves."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    trainer.weights = fingerprint(policy.model)


def sample(engine: Any, temperature: float, length: int) -> list[JSON]:
    for i, prompt in enumerate(PROMPTS):
        engine.add(Request(f"r{i}", prompt, SamplingParams(temperature, 1.0, 0, length, seed=i)))
    done = drain(engine)
    return [
        {"ids": done[f"r{i}"].token_ids, "logprobs": done[f"r{i}"].logprobs, "weights": done[f"r{i}"].weights}
        for i in range(len(PROMPTS))
    ]


def greedy(engine: Any) -> list[JSON]:
    return sample(engine, 0.0, 24)


def rows(engine: SyncedEngine) -> list[TrainRow]:
    """Sampled completions as a training batch."""
    return [
        TrainRow(
            [*prompt, *found["ids"]],
            [0] * len(prompt) + [1] * len(found["ids"]),
            [0.0] * len(prompt) + list(found["logprobs"]),
            1.0 - i,
        )
        for i, (prompt, found) in enumerate(zip(PROMPTS, sample(engine, 1.0, 64), strict=True))
    ]


def gate(engine: SyncedEngine, trainer: Trainer) -> JSON:
    """A step on what the engine sampled: the trainer's figures, or what it says against it."""
    batch = rows(engine)
    try:
        return {"figures": trainer.update(batch, len(batch), step=0), "error": None}
    except Exception as error:
        return {"figures": None, "error": f"{type(error).__name__}: {error}"}


def refusal(action: Callable[[], None]) -> str | None:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def change_while_running(policy: Policy, trainer: Trainer, engine: SyncedEngine) -> None:
    engine.add(Request("running", PROMPTS[0], SamplingParams(1.0, 1.0, 0, 8)))
    change(policy, trainer, 1e-3)
    try:
        engine.step()
    finally:
        engine.reset()


def fresh(policy: Policy, folder: Path) -> JSON:
    """A new engine on the folder that these weights are exported to."""
    save_policy(policy, folder / "saved")
    export(folder / "saved", folder / "base", folder / "exported")
    # As large as the run's engine: kernels add up in an order that depends on it.
    loaded = VLLMEngine(folder / "exported", max_model_len=MAX_LEN, max_num_seqs=CONCURRENCY)
    sync = WeightSync(policy.model, loaded)
    found: JSON = {"greedy": greedy(loaded), "proof": refusal(sync.prove)}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.1)  # more than the engine's bfloat16 rounds away
    found["proof_of_others"] = refusal(sync.prove)
    loaded.close()
    return found


def poisoned(policy: Policy, trainer: Trainer, engine: SyncedEngine) -> JSON:
    """A NaN in one tensor: refused before anything is loaded."""
    good, weights = greedy(engine), trainer.weights
    parameter = dict(policy.model.named_parameters())["model.layers.1.mlp.up_proj.weight"]
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter[3, 5] = float("nan")
    trainer.weights = fingerprint(policy.model)
    error = refusal(engine.refresh)
    with torch.no_grad():
        parameter.copy_(kept)
    trainer.weights = weights
    return {"error": error, "same": greedy(engine) == good, "good": good}


def stale_head(policy: Policy, trainer: Trainer, engine: SyncedEngine) -> JSON:
    """vLLM's own reload alone, without packing the tied head again."""
    repack = vllm_weights.repack_tied_heads
    vllm_weights.repack_tied_heads = lambda model: None
    change(policy, trainer, 0.02)
    error = refusal(engine.refresh)
    vllm_weights.repack_tied_heads = repack
    return {"error": error, "packed": engine.engine.inspect(is_packed), "after": refusal(engine.refresh)}


def is_packed(model: Any) -> bool:
    return any(hasattr(module, "cpu_linear") for module in model.modules())


def perturbed(trainer: Trainer, engine: SyncedEngine) -> JSON:
    """One layer of the engine is not what was loaded: the proof says which, and the gate trips without it."""

    def perturb(model: Any) -> None:
        with torch.no_grad():
            model.language_model.model.layers[2].post_attention_layernorm.weight.add_(1.0)

    engine.engine.inspect(perturb)
    return {"proof": refusal(engine._sync.prove), "step": gate(engine, trainer)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
