"""One of two ranks with a pretended server each: `torchrun … -m tests.train.server_ranks OUT`.

What fails on one rank must fail on both, and at once: a rank that waits for another's collective call waits for ever.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from shared.engines.vllm_server_client import VllmServer
from tests.train.conftest import VOCABULARY, tiny_model
from tests.train.fake_vllm import FakeVllm
from tests.train.test_weight_sync import LAYER_3_V, shift
from tests.train.vllm_sync_scenes import refusal
from train.servers import ServerRollouts, ServerSync, WeightFolder, share
from train.weight_sync import fingerprint


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    PartialState(cpu=True)
    model = tiny_model()
    fake = FakeVllm(model, VOCABULARY)
    with fake.serving() as (served, _):
        urls = gather_object([served.url])
        mine = [VllmServer.at(url) for url in share(urls, rank, 2)]
        for server in mine:
            object.__setattr__(server.control, "patience", 0.3)
        sync = ServerSync(model, mine, WeightFolder(out / "sync", writes=rank == 0))
        engine = ServerRollouts(mine, sync, lambda: fingerprint(model), concurrency=2)
        found: dict[str, Any] = {"urls": urls, "mine": served.url}

        def play(name: str) -> None:
            found[name] = {"error": refusal(engine.refresh), "label": fake.label, "loads": fake.loads}

        play("first")
        play("unchanged")
        if rank == 1:
            fake.restart()
        play("one was started anew")
        shift(model)
        if rank == 1:
            fake.engine.skip = {LAYER_3_V}
        play("one skips a tensor")
        fake.engine.skip = set()
        play("again")
        shift(model)
        if rank == 0:
            sync.folder._base = Path("/dev/null/sync")
        play("no folder")
        sync.folder._base = out / "sync"
        fake.dead = rank == 1
        play("one is dead")
        found["fingerprint"] = fingerprint(model)
        engine.close()
        gather_object([None])  # the other may still be asking
    (out / f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
