"""A vLLM server without vLLM: the endpoints that a trainer uses, with our own receiver behind them.

Its weights are laid out as vLLM lays them out (`FakeEngine` of test_weight_sync.py); what it says is a function of the
prompt and the seed.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from torch import nn

from shared.engines.vllm_server_client import VllmServer
from shared.engines.vllm_server_worker import WeightReceiver
from tests.engines.fake_server import Answer, FakeServer, serving
from tests.train.test_weight_sync import FakeEngine

JSON = dict[str, Any]


class Worker(WeightReceiver):
    """vLLM's worker with the receiver mixed in."""

    def __init__(self, engine: FakeEngine) -> None:
        self.get_model = lambda: engine.model
        self.reload_weights = lambda weights_iterator: engine.load_weights(weights_iterator)


@dataclass
class FakeVllm:
    """One server. `dead` breaks every connection off; `asked` counts completions."""

    live: nn.Module
    vocabulary: int
    stop: int = 0
    max_model_len: int = 4096
    world_size: int = 1
    dead: bool = False
    dies_after: int | None = None
    restarts_after: int | None = None
    loads: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another process: base weights, and nobody's label."""
        self.engine = FakeEngine(self.live)
        self.worker: WeightReceiver | object = Worker(self.engine)
        self.label, self.paused, self.dead = "default", False, False

    def answer(self, path: str, body: JSON) -> Answer:
        if self.dead:
            return None
        match urlsplit(path).path:
            case "/get_world_size":
                return {"world_size": self.world_size}
            case "/v1/models":
                return {"data": [{"id": "m", "max_model_len": self.max_model_len}]}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
                return {"success": True}
            case "/pause":
                self.paused = True
                return {"status": "paused"}
            case "/resume":
                self.paused = False
                return {"status": "resumed"}
            case "/reset_prefix_cache":
                return {"success": self.paused}
            case "/collective_rpc":
                return self._call(body["method"], body.get("args", []))
            case "/inference/v1/generate":
                return self._generate(body)
        return 404, {"detail": "Not Found"}

    def _call(self, method: str, arguments: list[str]) -> Answer:
        if not hasattr(self.worker, method):
            return 500, {"error": {"message": f"no attribute {method!r}"}}
        self.loads += method == "receive_weights"
        return {"results": [getattr(self.worker, method)(*arguments)]}

    def _generate(self, body: JSON) -> Answer:
        self.prompts.append(body["token_ids"])
        if self.dies_after is not None and len(self.prompts) > self.dies_after:
            self.dead = True
            return None
        if self.restarts_after is not None and len(self.prompts) > self.restarts_after:
            self.restarts_after = None
            self.restart()
        assert not self.paused
        params = body["sampling_params"]
        draw = random.Random(json.dumps([body["token_ids"], params["seed"]]))
        ids = [draw.randrange(self.vocabulary) for _ in range(min(6, params["max_tokens"]))]
        ids[-1] = params["stop_token_ids"][0] if params["stop_token_ids"] else ids[-1]
        content = [{"token_id": token, "logprob": -1.0} for token in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return {"choices": [choice | {"weight_versions": [{"version": self.label, "start": 0, "end": len(ids)}]}]}

    @contextmanager
    def serving(self) -> Iterator[tuple[FakeServer, VllmServer]]:
        """Served, and a client with little patience."""
        with serving(self.answer) as fake:
            yield fake, VllmServer.at(fake.url, patience=0.5)
