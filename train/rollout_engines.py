"""The engine that a run rolls out with, and what keeps its weights the trainer's.

`hf` decodes on the trainer's own model object. `vllm` has a copy of the weights (one engine in each rank, in the
trainer's process); `SyncedEngine` replaces them whenever the trainer's have changed, with proof, before it takes a
request. `server` asks vLLM servers (train/servers.py). The tests run one and two ranks on vLLM's CPU build.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.engines.base import Completion, Engine, Request
from shared.engines.hf import HFEngine
from shared.errors import SetupError
from train.config import TrainConfig
from train.model import Policy, load_model, model_folder
from train.servers import check_servers, server_rollouts
from train.sharding import WholeCopy, is_sharded
from train.trainer import Trainer
from train.weight_sync import WeightHolder, WeightSync

_SEED_MASK = 0x7FFFFFFF


class RolloutEngine(Engine, Protocol):
    """An engine whose weights change between steps."""

    def refresh(self) -> None:
        """Bring the engine to the trainer's present weights. All ranks call it before any samples: it may gather."""

    def reset(self) -> None:
        """Forget all requests and caches: what was computed under other weights must not be continued."""


class SleepingEngine(Engine, WeightHolder, Protocol):
    """An engine with weights of its own that can leave its memory to the trainer; `VLLMEngine` is one.

    `weights` is called for the name of the weights that each completion came from.
    """

    weights: Callable[[], str]

    def reset(self) -> None:
        """Abort all requests and forget all prefixes."""

    def sleep(self) -> None:
        """Give the memory of weights and caches back. What was in it is lost."""

    def wake(self) -> None:
        """Take memory again. The weights are undefined until they are loaded."""


EngineFactory = Callable[[Policy, Trainer], RolloutEngine]


def check_rollout_engine(config: TrainConfig) -> None:
    """SetupError when the config's engine cannot work here: asked before anything is loaded."""
    if config.rollout.engine == "server":
        check_servers(config)
    if config.rollout.engine != "vllm":
        return
    from shared.engines.vllm import can_sleep, import_vllm

    import_vllm()
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise SetupError(
            "rollout.engine: vllm reaches the engine's weights in this process; unset VLLM_ENABLE_V1_MULTIPROCESSING"
        )
    if config.rollout.vllm.sleep and not can_sleep():
        raise SetupError("rollout.vllm.sleep: vLLM's CPU build cannot sleep; set it to false")


def make_rollout_engine(policy: Policy, trainer: Trainer) -> RolloutEngine:
    """The engine that the run's config asks for."""
    if trainer.config.rollout.engine == "vllm":
        return vllm_engine(policy, trainer)
    if trainer.config.rollout.engine == "server":
        ranks = trainer.accelerator
        return server_rollouts(
            policy.model, trainer.config, lambda: trainer.weights, ranks.process_index, ranks.num_processes
        )
    return colocated_engine(policy, trainer)


def colocated_engine(policy: Policy, trainer: Trainer) -> RolloutEngine:
    """The HF engine on the trainer's own model object: nothing to copy, and never out of date."""
    if is_sharded(trainer.model):
        return CopyEngine(WholeCopy(trainer.model, load_model(trainer.config.model), trainer.device), trainer)
    return ColocatedEngine(policy.model, weights=lambda: trainer.weights)


class CopyEngine(HFEngine):
    """The HF engine on a whole copy of a sharded model; `refresh` brings it up to date."""

    def __init__(self, copy: WholeCopy, trainer: Trainer) -> None:
        super().__init__(copy.model, weights=lambda: self._held)
        self._copy, self._trainer, self._held = copy, trainer, ""

    def refresh(self) -> None:
        if self._held != self._trainer.weights:
            self.reset()
            self._copy.refresh()
            self._held = self._trainer.weights


class ColocatedEngine(HFEngine):
    """The HF engine on the trainer's own model object."""

    def refresh(self) -> None:
        """Nothing to do: there is one set of weights."""


def vllm_engine(policy: Policy, trainer: Trainer) -> "SyncedEngine":
    """vLLM on the folder of the run's start; a resumed run's weights come with the first sync."""
    from shared.engines.vllm import VLLMEngine

    config = trainer.config
    check_rollout_engine(config)
    settings, ranks = config.rollout.vllm, trainer.accelerator.num_processes
    options: dict[str, Any] = {
        "gpu_memory_utilization": settings.gpu_memory,
        "max_num_seqs": config.rollout.concurrency,
        "enable_sleep_mode": settings.sleep,
    }
    if settings.enforce_eager:
        # Left out, not False: on a CPU the engine's own choice is not to compile.
        options["enforce_eager"] = True
    if ranks > 1:
        # Each rank's engine stands alone within the process group that torchrun's ranks have made already.
        options["distributed_executor_backend"] = "external_launcher"
    engine = VLLMEngine(
        model_folder(config.model.path, config.model.revision),
        max_model_len=config.rollout.max_tokens,
        dtype=settings.dtype,
        seed=config.seed & _SEED_MASK,
        **(options | settings.options),
    )
    return SyncedEngine(engine, WeightSync(policy.model, engine), lambda: trainer.weights, sleeps=settings.sleep)


class SyncedEngine:
    """An engine with weights of its own that never samples from others than the trainer's.

    `weights` names the trainer's present weights. The first request after they changed, or after the engine slept,
    loads them. `syncs` and `sync_seconds` count these loads, the proof included.
    """

    def __init__(
        self, engine: SleepingEngine, sync: WeightSync, weights: Callable[[], str], *, sleeps: bool = False
    ) -> None:
        self.engine = engine
        self.syncs, self.sync_seconds = 0, 0.0
        self._sync = sync
        self._weights = weights
        self._sleeps = sleeps
        self._asleep = False
        # What the engine was built from has not been compared with the trainer's, so it counts as unknown.
        self._held = ""
        engine.weights = lambda: self._held

    @property
    def batches_by_itself(self) -> bool:
        return self.engine.batches_by_itself

    def add(self, request: Request) -> None:
        """Queue a request, on the trainer's present weights. RuntimeError when they changed while others run."""
        self.refresh()
        self.engine.add(request)

    def refresh(self) -> None:
        """Bring the engine to the trainer's weights if it has others. Errors are `WeightSync.push`'s."""
        wanted = self._weights()
        if self._held == wanted and not self._asleep:
            return
        self._check_unchanged()
        started = time.perf_counter()
        # Until the proof is there it holds nothing that may be used.
        self._held = ""
        if self._asleep:
            self.engine.wake()
            self._asleep = False
        self._sync.push()
        self._held = wanted
        self.syncs += 1
        self.sync_seconds += time.perf_counter() - started

    def step(self) -> list[Completion]:
        """What finished in one step. RuntimeError when the trainer's weights changed under running requests."""
        self._check_unchanged()
        return self.engine.step()

    def has_work(self) -> bool:
        return self.engine.has_work()

    def end_session(self, session: str) -> None:
        self.engine.end_session(session)

    def reset(self) -> None:
        """Abort everything and forget all prefixes; with `sleeps`, give the memory back until the next request."""
        if self._asleep:
            return
        self.engine.reset()
        if self._sleeps:
            self._held, self._asleep = "", True
            self.engine.sleep()

    def close(self) -> None:
        self.engine.close()

    def _check_unchanged(self) -> None:
        if self.engine.has_work() and self._held != self._weights():
            raise RuntimeError(f"the weights changed from {self._held} to {self._weights()} under running requests")
