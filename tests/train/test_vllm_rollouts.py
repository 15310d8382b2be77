"""Training with vLLM as the rollout engine: its weights are the trainer's, it is noticed when they are not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shared.errors import SetupError
from tests.engines.vllm_here import ENVIRONMENT, need_vllm

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.xdist_group("vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return write_tiny_base(tmp_path_factory.mktemp("sync"))


def write_tiny_base(folder: Path) -> Path:
    """The folder, with a base that vLLM takes."""
    from tests.engines.tiny_export import SHAPES
    from train import tiny

    with patch.multiple(tiny, **SHAPES):
        tiny.write_base(folder / "base", seed=1, layout="canonical")
    return folder


def play(*command: str) -> None:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]


@pytest.fixture(scope="module")
def scenes(folder: Path) -> dict[str, Any]:
    """What tests/train/vllm_sync_scenes.py saw."""
    play("-m", "tests.train.vllm_sync_scenes", str(folder), str(folder / "scenes.json"))
    found: dict[str, Any] = json.loads((folder / "scenes.json").read_text())
    return found


def told(completions: list[dict[str, Any]], key: str = "ids") -> list[Any]:
    return [completion[key] for completion in completions]


def names(completions: list[dict[str, Any]]) -> set[str]:
    return set(told(completions, "weights"))


def test_a_run_rolls_out_with_vllm_and_passes_the_gate(scenes: dict[str, Any], folder: Path) -> None:
    assert scenes["code"] == 0
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    for line in lines:
        # 0 would mean that the trainer compared the sampler's numbers with themselves.
        assert 0 < line["gap_mean"] < 0.05
        assert line["train_tokens"] > 0
        assert line["grad_norm"] > 0
    assert scenes["run_weights"] == lines[-1]["weights"]


def test_all_live_tensors_are_mapped(scenes: dict[str, Any]) -> None:
    mapped = scenes["names"]
    # 3 linear-attention layers x 14, 1 full-attention layer x 11, embedding and last norm.
    assert len(mapped) == len(set(mapped.values())) == 3 * 14 + 11 + 2
    assert all(name.startswith("model.language_model.") for name in mapped.values())
    # The tied head is compared as well: it may have a copy of its own.
    assert scenes["pieces"] == len(mapped) + 1


def test_completions_carry_the_weights_that_were_loaded(scenes: dict[str, Any]) -> None:
    assert names(scenes["before"]) == {scenes["run_weights"]}
    assert names(scenes["changed"]) == {scenes["changed_weights"]}
    assert scenes["run_weights"] != scenes["changed_weights"]


def test_weights_are_loaded_when_they_changed_and_only_then(scenes: dict[str, Any]) -> None:
    assert scenes["run_syncs"] == 2, "one before each step; the last update goes over when somebody asks"
    assert scenes["last_syncs"] == scenes["unchanged_syncs"] == 3
    assert scenes["changed_syncs"] == 4
    assert told(scenes["again"]) == told(scenes["before"])
    assert told(scenes["changed"]) != told(scenes["before"])
    assert told(scenes["updated"]) != told(scenes["changed"])


def test_greedy_output_is_that_of_an_engine_freshly_loaded_from_the_export(scenes: dict[str, Any]) -> None:
    fresh = scenes["fresh"]
    assert told(fresh["greedy"]) == told(scenes["last"])
    assert told(fresh["greedy"], "logprobs") == told(scenes["last"], "logprobs")
    assert len({token for ids in told(fresh["greedy"]) for token in ids}) > 10


def test_the_proof_holds_for_a_fresh_engine_and_not_for_other_weights(scenes: dict[str, Any]) -> None:
    assert scenes["fresh"]["proof"] is None
    assert f"({scenes['pieces']} of {scenes['pieces']} pieces differ)" in scenes["fresh"]["proof_of_others"]


def test_a_step_on_what_it_sampled_passes_the_gate(scenes: dict[str, Any]) -> None:
    assert scenes["step"]["error"] is None
    figures = scenes["step"]["figures"]
    assert figures["train_tokens"] == 5 * 64
    assert 0 < figures["gap_mean"] < 0.05
    assert 0.95 < figures["ratio_min"] <= figures["ratio_max"] < 1.05


def test_one_perturbed_layer_is_named_by_the_proof_and_trips_the_gate(scenes: dict[str, Any]) -> None:
    assert "model.layers.2.post_attention_layernorm.weight is not what the engine's" in scenes["perturbed"]["proof"]
    assert f"(1 of {scenes['pieces']} pieces differ)" in scenes["perturbed"]["proof"]
    assert scenes["perturbed"]["step"]["error"].startswith(
        "SetupError: log-prob gate, step 0: mean |trainer - sampler|"
    )


def test_weights_that_change_under_running_requests_are_noticed(scenes: dict[str, Any]) -> None:
    assert scenes["under_running"].startswith("RuntimeError: the weights changed from")


def test_a_nan_is_refused_before_anything_is_loaded(scenes: dict[str, Any]) -> None:
    error = scenes["poisoned"]["error"]
    assert error.startswith("SetupError: weight sync: model.layers.1.mlp.up_proj.weight holds 1 numbers")
    assert scenes["poisoned"]["same"]


def test_a_head_that_kept_its_old_packed_weights_is_noticed(scenes: dict[str, Any]) -> None:
    if not scenes["stale_head"]["packed"]:
        pytest.skip("this vLLM packs no weights")
    assert (
        scenes["stale_head"]["error"] is None or "lm_head.weight holds after loading" in scenes["stale_head"]["error"]
    )
    assert scenes["stale_head"]["after"] is None


def test_the_cpu_build_is_not_sent_to_sleep(scenes: dict[str, Any]) -> None:
    """It ignores being asked, so the trainer would wait for memory that never comes back."""
    if scenes["can_sleep"]:
        assert scenes["sleep"] is None
    else:
        assert scenes["sleep"] == "SetupError: rollout.vllm.sleep: vLLM's CPU build cannot sleep; set it to false"


def play_ranks(folder: Path, out: Path, parallel: str, *overrides: str) -> list[dict[str, Any]]:
    """What each of two ranks saw of a run."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.train.vllm_ranks")
    play(*launcher, str(folder), str(out), parallel, *overrides)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def check_two_ranks(ranks: list[dict[str, Any]], out: Path) -> None:
    """They took the same steps, on their own halves of the same questions, from the same weights, to the same end."""
    lines = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [rank["code"] for rank in ranks] == [0, 0]
    assert [line["step"] for line in lines] == [0, 1]
    for step, line in enumerate(lines):
        first, second = (rank["steps"][step] for rank in ranks)
        assert first["questions"] + second["questions"] == line["questions"]
        assert first["episodes"] == second["episodes"] == [3]
        assert first["weights"] == second["weights"] == [first["expected"]] == [second["expected"]]
        assert 0 < line["gap_mean"] < 0.05
        assert line["grad_norm"] > 0
    assert ranks[0]["steps"][1]["expected"] == lines[0]["weights"] != ranks[0]["steps"][0]["expected"]
    assert ranks[0]["fingerprint"] == ranks[1]["fingerprint"] == lines[1]["weights"]
    assert ranks[0]["parameters"] == ranks[1]["parameters"]
    assert told(ranks[0]["greedy"]) == told(ranks[1]["greedy"])
    assert names(ranks[0]["greedy"]) == names(ranks[1]["greedy"]) == {lines[1]["weights"]}


def test_two_ranks_with_an_engine_each_take_the_same_steps(folder: Path, tmp_path: Path) -> None:
    ranks = play_ranks(folder, tmp_path, "ddp")
    check_two_ranks(ranks, tmp_path)
    # Before each step, and when the test asks at the end: every tensor of each rank's engine.
    assert [rank["proofs"] for rank in ranks] == [[56] * 3] * 2
    assert "(1 of 56 pieces differ)" in ranks[1]["perturbed"], "the proof of the second rank is about its own engine"


@pytest.mark.slow
def test_two_sharded_ranks_with_an_engine_each_take_the_same_steps(folder: Path, tmp_path: Path) -> None:
    ranks = play_ranks(folder, tmp_path, "fsdp")
    check_two_ranks(ranks, tmp_path)
    assert [rank["proofs"] for rank in ranks] == [[56] * 3] * 2


def test_an_engine_in_another_process_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shared.engines import vllm
    from tests.train.vllm_sync_scenes import make_config
    from train.rollout_engines import check_rollout_engine

    monkeypatch.setattr(vllm, "import_vllm", lambda: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(SetupError, match="unset VLLM_ENABLE_V1_MULTIPROCESSING"):
        check_rollout_engine(make_config(tmp_path))
