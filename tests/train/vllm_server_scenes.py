"""A run that rolls out with a real vLLM server, and what happens to its weights afterwards:
`python -m tests.train.vllm_server_scenes FOLDER URL PROCESS OUT`.

FOLDER holds `base`, of which the server at URL was started; the last scene kills it.
See tests/train/vllm_sync_scenes.py for the rest.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from shared.engines.base import Request, SamplingParams
from shared.engines.vllm import VLLMEngine
from shared.engines.vllm_server_client import VllmServer
from tests.engines.tiny_export import export
from tests.train.vllm_sync_scenes import (
    CONCURRENCY,
    MAX_LEN,
    PROMPTS,
    change,
    gate,
    greedy,
    make_config,
    paying,
    refusal,
)
from train import loop
from train.config import TrainConfig
from train.model import Policy
from train.pool import load_pool
from train.rollout_engines import make_rollout_engine
from train.servers import ServerRollouts, WeightFolder
from train.stopping import StopFlag
from train.trainer import Trainer

JSON = dict[str, Any]


def main(folder: Path, url: str, server: int, out: Path) -> None:
    config = make_config(folder, engine="server", servers=[url])
    found: JSON = {"before": VllmServer.at(url).label()}
    with paying():
        code, policy, trainer, engine = play(config)
    found |= {"code": code, "syncs": engine.syncs, "run_weights": trainer.weights, "pieces": len(engine._sync.pieces)}
    engine.refresh()
    found |= {"label": VllmServer.at(url).label(), "trained": greedy(engine)}
    export(folder / "run" / "checkpoint-step-2", folder / "base", folder / "exported")
    found["fresh"] = fresh(folder / "exported")

    found["restarted"] = restarted(engine)
    change(policy, trainer, 0.02)
    found["stale"] = refusal(lambda: engine.add(Request("r", PROMPTS[0], SamplingParams())))
    engine.refresh()
    found |= {"changed_weights": trainer.weights, "changed": greedy(engine), "step": gate(engine, trainer)}
    found["incomplete"] = spoilt(engine, trainer, policy, "model.language_model.layers.1.mlp.down_proj.weight", None)
    found["wrong"] = spoilt(engine, trainer, policy, "model.language_model.norm.weight", 1.0)
    found["mended"] = refusal(engine.refresh)

    # Started again, the run finds a server that holds whatever the scenes have left.
    with paying():
        code, _, trainer, engine = play(config.model_copy(update={"steps": 3}), look=found)
    found |= {"resumed_code": code, "resumed_syncs": engine.syncs}
    found["dead"] = dead(engine, server)
    out.write_text(json.dumps(found), encoding="utf-8")


def play(config: TrainConfig, look: JSON | None = None) -> tuple[int, Policy, Trainer, ServerRollouts]:
    """A run with the command's own parts; `look` gets what its engine says before the first step."""
    kept: list[tuple[Policy, Trainer, ServerRollouts]] = []

    def make(policy: Policy, trainer: Trainer) -> ServerRollouts:
        engine = make_rollout_engine(policy, trainer)
        assert isinstance(engine, ServerRollouts)
        kept.append((policy, trainer, engine))
        if look is not None:
            engine.refresh()
            look["resumed"] = greedy(engine)
        return engine

    pool = load_pool(config.data, config.output, config.seed)
    with patch.object(ServerRollouts, "close", ServerRollouts.reset):  # outlives its run
        code = loop.run_training(config, pool, StopFlag(config.output), make)
    return code, *kept[0]


def fresh(folder: Path) -> list[JSON]:
    """What a new engine on the exported checkpoint says."""
    # As large as the server: kernels add up in an order that depends on it.
    engine = VLLMEngine(folder, max_model_len=MAX_LEN, max_num_seqs=CONCURRENCY)
    said = greedy(engine)
    engine.close()
    return said


def restarted(engine: ServerRollouts) -> JSON:
    """The server loses its label between turns, as one that was started anew has none."""
    server = engine.servers[0]
    before = engine.syncs
    server._set_label("default")
    engine.refresh()
    found: JSON = {"syncs": engine.syncs - before, "said": greedy(engine)}
    engine.add(Request("long", PROMPTS[0], SamplingParams(1.0, 1.0, 0, 300)))
    server._set_label("default")

    def drain() -> None:
        while engine.has_work():
            engine.step()

    found["error"] = refusal(drain)
    engine.refresh()
    return found


def spoilt(engine: ServerRollouts, trainer: Trainer, policy: Policy, name: str, by: float | None) -> JSON:
    """One tensor is left out of the files (`by` None), or is another one than the trainer's."""
    add = WeightFolder.add

    def spoil(self: WeightFolder, written: str, tensor: Tensor) -> None:
        if written != name:
            add(self, written, tensor)
        elif by is not None:
            add(self, written, tensor + by)

    change(policy, trainer, 0.02)
    with patch.object(WeightFolder, "add", spoil):
        error = refusal(engine.refresh)
    return {"error": error, "label": engine.servers[0].label()}


def dead(engine: ServerRollouts, server: int) -> str | None:
    """The server is killed under a running request."""
    engine.refresh()
    object.__setattr__(engine.servers[0].completions, "patience", 2.0)
    engine.add(Request("last", PROMPTS[0], SamplingParams(1.0, 1.0, 0, 300)))
    os.kill(server, signal.SIGKILL)

    def drain() -> None:
        while engine.has_work():
            engine.step()

    return refusal(drain)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
