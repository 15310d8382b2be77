"""Training with real vLLM servers for its rollouts: weights over HTTP, proven there, and on every completion."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config import dump_config
from tests.engines import vllm_server
from tests.engines.vllm_here import ENVIRONMENT, need_vllm
from tests.train.test_vllm_rollouts import ROOT, check_two_ranks, names, play, play_ranks, told, write_tiny_base
from tests.train.vllm_sync_scenes import CONCURRENCY, MAX_LEN, make_config
from train.checkpoint import newest_complete
from train.servers import ADDRESSES

pytestmark = pytest.mark.xdist_group("vllm")

FLAGS = ("--max-model-len", str(MAX_LEN), "--max-num-seqs", str(CONCURRENCY))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return write_tiny_base(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="module")
def scenes(folder: Path) -> dict[str, Any]:
    """What tests/train/vllm_server_scenes.py saw; it kills the server in the end."""
    with vllm_server.started(folder / "base", folder / "server.log", *FLAGS) as (url, server):
        play("-m", "tests.train.vllm_server_scenes", str(folder), url, str(server), str(folder / "scenes.json"))
    found: dict[str, Any] = json.loads((folder / "scenes.json").read_text())
    return found


def test_a_run_rolls_out_with_a_server_and_passes_the_gate(scenes: dict[str, Any], folder: Path) -> None:
    assert (scenes["code"], scenes["resumed_code"]) == (0, 0)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        # 0 would mean that the trainer compared the sampler's numbers with themselves.
        assert 0 < line["gap_mean"] < 0.05
        assert line["grad_norm"] > 0
    assert scenes["run_weights"] == lines[1]["weights"]
    assert len({line["weights"] for line in lines}) == 3


def test_every_update_is_loaded_proven_and_labelled(scenes: dict[str, Any]) -> None:
    assert scenes["before"] == "default"
    assert scenes["syncs"] == 2, "one before each step; the last update goes over when somebody asks"
    # 3 linear-attention layers x 14, 1 full-attention layer x 11, embedding, last norm, and the tied head.
    assert scenes["pieces"] == 3 * 14 + 11 + 2 + 1
    assert scenes["label"] == scenes["run_weights"]
    assert names(scenes["trained"]) == {scenes["run_weights"]}
    assert names(scenes["changed"]) == {scenes["changed_weights"]}
    assert told(scenes["changed"]) != told(scenes["trained"])


def test_greedy_over_http_is_that_of_an_engine_freshly_loaded_from_the_checkpoint(scenes: dict[str, Any]) -> None:
    assert told(scenes["trained"]) == told(scenes["fresh"])
    assert told(scenes["trained"], "logprobs") == told(scenes["fresh"], "logprobs")
    assert len({token for ids in told(scenes["fresh"]) for token in ids}) > 5


def test_the_first_rollout_after_a_resume_has_the_resumed_weights(scenes: dict[str, Any]) -> None:
    """The server held what the scenes had left in it."""
    assert names(scenes["resumed"]) == {scenes["run_weights"]}
    assert told(scenes["resumed"]) == told(scenes["fresh"])


def test_a_step_on_what_it_sampled_passes_the_gate(scenes: dict[str, Any]) -> None:
    assert scenes["step"]["error"] is None
    assert 0 < scenes["step"]["figures"]["gap_mean"] < 0.05
    assert scenes["stale"].startswith("RuntimeError: the servers hold")


def test_a_server_without_our_label_gets_the_weights_again_or_is_refused(scenes: dict[str, Any]) -> None:
    assert scenes["restarted"]["syncs"] == 1
    assert told(scenes["restarted"]["said"]) == told(scenes["trained"])
    assert "samples with the weights default" in scenes["restarted"]["error"]


def test_a_load_that_is_not_complete_or_not_right_is_refused(scenes: dict[str, Any]) -> None:
    assert scenes["incomplete"]["label"] == scenes["wrong"]["label"] == "unproven"
    assert (
        "cannot receive weights: ValueError: the files have 54 tensors and not these 55"
        in scenes["incomplete"]["error"]
    )
    assert (
        "weight sync: model.norm.weight is not what language_model.model.norm.weight of the" in scenes["wrong"]["error"]
    )
    assert scenes["mended"] is None


def test_a_server_that_is_killed_is_given_up_in_one_line(scenes: dict[str, Any]) -> None:
    assert scenes["dead"].startswith("SetupError: the server at http://127.0.0.1:")
    assert "see that it runs" in scenes["dead"]


@pytest.mark.slow
def test_two_ranks_share_a_server(folder: Path, tmp_path: Path) -> None:
    """Whole on each rank or spread over both."""
    with vllm_server.serving(folder / "base", folder / "shared.log", *FLAGS) as url:
        for parallel in ("ddp", "fsdp"):
            out = tmp_path / parallel
            out.mkdir()
            ranks = play_ranks(folder, out, parallel, "engine=server", f"servers=[{url}]")
            # The first rank alone loads it; both compare what it says with the trainer's fingerprint.
            assert [rank["proofs"] for rank in ranks] == [[56] * 3, [0] * 3]
            check_two_ranks(ranks, out)
            assert not list((out / "run").glob("sync*"))


@pytest.mark.slow
def test_a_run_whose_server_was_killed_goes_on_with_another(folder: Path, tmp_path: Path) -> None:
    """Programs and nothing else: `train.run` beside a server that is killed in a step, then both once more."""
    config = make_config(folder, engine="server").model_copy(update={"output": tmp_path / "run"})
    (tmp_path / "c.yaml").write_text(dump_config(config))
    # Nothing is right, so it is the decay that moves the weights.
    keys = ["steps=500", "checkpoint.every=1", "optimizer.weight_decay=0.1"]
    command = [sys.executable, "-m", "train.run", "--config", str(tmp_path / "c.yaml"), *keys]

    def start(url: str, *more: str) -> subprocess.Popen[str]:
        environment = os.environ | ENVIRONMENT | {ADDRESSES: url}
        return subprocess.Popen([*command, *more], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    path = tmp_path / "run" / "metrics.jsonl"
    with vllm_server.started(folder / "base", folder / "first.log", *FLAGS) as (url, server):
        run = start(url)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not path.exists() or path.read_text().count("\n") < 3):
            time.sleep(0.1)
        os.kill(server, signal.SIGKILL)
        _, said = run.communicate(timeout=180)
    assert run.returncode == 2, said
    assert said.splitlines()[-1].startswith("error: the server at http://127.0.0.1:")
    done = newest_complete(tmp_path / "run")
    assert done is not None
    assert done[0] >= 3
    with vllm_server.serving(folder / "base", folder / "second.log", *FLAGS) as url:
        run = start(url, f"steps={done[0] + 2}")
        _, said = run.communicate(timeout=180)
    assert run.returncode == 0, said
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(done[0] + 2))
    assert len({line["weights"] for line in lines}) == len(lines)
    assert all(0 < line["gap_mean"] < 0.05 for line in lines)


@pytest.fixture(autouse=True)
def _where_it_says_why(folder: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """The server's own words beside a failure."""
    yield
    log = folder / "server.log"
    if log.is_file():
        print(log.read_text(errors="replace")[-3000:])
