"""Whole runs with scripted episodes: files, resuming, stopping, and what stops a run."""

import math
from pathlib import Path
from typing import Any

import pytest

from shared.config import load_config
from shared.errors import SetupError
from tests.train import scripted_run as scripted
from tests.train.scripted_run import assert_same_run, finish, metrics
from train.checkpoint import newest_complete
from train.config import TrainConfig
from train.stopping import EXIT_REQUEUE, STOP_FILE, only_one

ROOT = Path(__file__).parents[2]


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    lines = metrics(finished)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-9), "at the start the policy is the reference"
    assert lines[-1]["kl"] > 1e-4
    assert len({line["weights"] for line in lines}) == 5
    for line in lines:
        assert line["episodes"] == 24
        assert line["exact"] == line["tier_equivalent"]
        tiers = ("equivalent", "executable", "parsable", "invalid")
        assert sum(line[f"tier_{tier}"] for tier in tiers) == pytest.approx(1)
        assert line["gap_mean"] < 1e-5
        assert line["ratio_min"] == pytest.approx(1, abs=1e-4)
    run = finished / "run"
    assert load_config(run / "config.yaml", TrainConfig).output == run
    assert sorted(path.name for path in run.glob("checkpoint*")) == ["checkpoint-step-4", "checkpoint-step-5"]
    assert sorted(path.name for path in (run / "episodes").iterdir()) == [f"step-00000{i}.jsonl" for i in (0, 2, 4)]
    assert newest_complete(run) == (5, run / "checkpoint-step-5")


def test_the_empty_gold_is_never_drawn_and_counted(finished: Path) -> None:
    lines = metrics(finished)
    assert all("q23" not in line["questions"] for line in lines)
    assert sum(line["skipped"].get("gold_empty", 0) for line in lines) > 0


def test_the_kl_coefficient_follows_the_target(finished: Path) -> None:
    lines = metrics(finished)
    assert lines[0]["kl_coefficient"] == 0.02
    assert lines[1]["kl_coefficient"] == pytest.approx(0.02 * 0.98)
    assert lines[-1]["kl_coefficient"] > lines[1]["kl_coefficient"]


def test_starting_a_finished_run_again_does_nothing(finished: Path, model_folder: Path) -> None:
    before = metrics(finished)
    assert finish(finished, model_folder) == before


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, model_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """STOP appears during the rollouts of a step: that step is given up, and done again after the resume."""
    config = scripted.make_config(tmp_path, model_folder)
    text = scripted.ScriptedPolicy._text

    def stopping(self: Any, request: Any) -> str:
        done = len(metrics(tmp_path)) if (tmp_path / "run" / "metrics.jsonl").exists() else 0
        if done == stop_at:
            (tmp_path / "run" / STOP_FILE).touch()
        answer: str = text(self, request)
        return answer

    monkeypatch.setattr("train.stopping._LOOK_EVERY", 0.0)
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", stopping)
    assert scripted.run(config, tmp_path) == EXIT_REQUEUE
    found = newest_complete(tmp_path / "run")
    assert found is not None
    assert found[0] == stop_at
    assert not (tmp_path / "run" / STOP_FILE).exists()
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", text)
    assert_same_run(finish(tmp_path, model_folder), metrics(finished))


def test_eight_bit_moments_resume_as_they_were(tmp_path: Path, model_folder: Path) -> None:
    whole = finish(tmp_path / "whole", model_folder, "optimizer.name=adamw8bit")
    finish(tmp_path / "parts", model_folder, "optimizer.name=adamw8bit", "steps=3", "planned_steps=5")
    assert_same_run(finish(tmp_path / "parts", model_folder, "optimizer.name=adamw8bit"), whole)


def test_other_data_or_seed_is_not_continued(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(tmp_path, model_folder, "steps=1")
    with pytest.raises(SetupError, match="seed 0, the config says 1"):
        finish(tmp_path, model_folder, "seed=1")
    pool = scripted.shop_pool
    monkeypatch.setattr(scripted, "shop_pool", lambda folder: pool(folder, 20))
    with pytest.raises(SetupError, match="another question pool"):
        finish(tmp_path, model_folder)


@pytest.mark.parametrize("budget", [1, 1000])
def test_the_micro_batch_budget_changes_nothing_but_rounding(
    tmp_path: Path, model_folder: Path, finished: Path, budget: int
) -> None:
    lines = finish(tmp_path, model_folder, f"loss.micro_batch_tokens={budget}", "steps=2", "planned_steps=5")
    for ours, theirs in zip(lines, metrics(finished)[:2], strict=True):
        for key in ("loss", "grad_norm", "kl", "ratio_mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


def test_checkpointing_and_two_inner_epochs_run(tmp_path: Path, model_folder: Path) -> None:
    lines = finish(tmp_path, model_folder, "steps=2", "model.gradient_checkpointing=true", "loss.inner_epochs=2")
    assert lines[1]["kl"] > 0


def test_an_offloaded_reference_changes_nothing(tmp_path: Path, model_folder: Path, finished: Path) -> None:
    lines = finish(tmp_path, model_folder, "loss.kl.offload=true", "steps=3", "planned_steps=5")
    assert lines[2]["kl"] > 0
    assert [line["kl"] for line in lines] == [line["kl"] for line in metrics(finished)[:3]]
    assert_same_run(lines, metrics(finished)[:3])


def test_without_kl_no_reference_is_kept(tmp_path: Path, model_folder: Path) -> None:
    lines = finish(tmp_path, model_folder, "steps=1", "loss.kl.mode=off", "optimizer.name=muon")
    assert lines[0]["kl"] == lines[0]["kl_coefficient"] == 0


def test_a_step_without_signal_is_logged_as_empty_and_changes_nothing(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", lambda self, request: "I cannot")
    lines = finish(tmp_path, model_folder, "steps=2")
    assert [line["empty"] for line in lines] == [1.0, 1.0]
    assert lines[0]["weights"] == lines[1]["weights"]
    assert lines[0]["groups_dropped"] == 6
    assert all(value is not None for line in lines for value in line.values())


def test_groups_without_signal_are_replaced_when_asked_for(tmp_path: Path, model_folder: Path) -> None:
    skipping, refilling = (
        finish(tmp_path / str(refill), model_folder, "steps=3", f"reward.refill={refill}", "reward.group_filter=exact")
        for refill in (0, 3)
    )
    # As the script has it: a question whose candidates are all right or all wrong comes up now and then.
    assert sum(line["groups_dropped"] for line in skipping) > 0
    assert all(len(line["questions"]) == 6 for line in skipping)
    for fewer, more in zip(skipping, refilling, strict=True):
        drawn = len(more["questions"])
        assert len(set(more["questions"])) == drawn, "no question twice in a step"
        assert drawn - more["groups_dropped"] == 6, "six with signal, however many were asked"
        assert more["train_episodes"] == 6 * 4
        assert more["episodes"] == drawn * 4, "figures are about all that was asked"
        if fewer["step"] == 0:
            assert more["questions"][:6] == fewer["questions"]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("grpo_*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_run_takes_a_step_with_a_tiny_model(tmp_path: Path, model_folder: Path, path: Path) -> None:
    shipped = load_config(path, TrainConfig)
    # What the recipe says of steps, batches, loss and optimizer stays; the rest is this machine's.
    config = load_config(
        path,
        TrainConfig,
        [
            f"output={tmp_path / 'run'}",
            f"model.path={model_folder}",
            f"planned_steps={shipped.steps}",
            *("steps=1", "device=cpu", "rollout.engine=hf", "validation.every=0"),
        ],
    )
    assert scripted.run(config, tmp_path) == 0
    line = metrics(tmp_path)[0]
    assert line["episodes"] == 18 * 8
    assert line["lr"] == pytest.approx(1e-5 / math.ceil(0.05 * shipped.steps)), "the first step of the warm-up"
    assert line["gap_mean"] <= shipped.gate.mean_gap
    assert len(set(line["questions"])) == 18


def test_a_refill_that_finds_nothing_ends(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", lambda self, request: "I cannot")
    lines = finish(tmp_path, model_folder, "steps=1", "reward.refill=9")
    assert lines[0]["empty"] == 1.0
    assert len(lines[0]["questions"]) == 23, "the pool without its empty gold"


def test_the_gate_stops_before_the_first_update_and_says_the_figures(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(
        SetupError, match=r"gate, step 0: mean \|trainer - sampler\| is 0\.0500.*limit gate\.mean_gap is 0\.02"
    ):
        finish(tmp_path, model_folder, gap=0.05)
    assert newest_complete(tmp_path / "run") is None
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_in_progress_keeps_its_folder(tmp_path: Path, model_folder: Path) -> None:
    with only_one(tmp_path / "run"), pytest.raises(SetupError, match="in use by another run"):
        finish(tmp_path, model_folder)


def test_episodes_of_other_weights_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="sampled from weights base, the trainer holds"):
        finish(tmp_path, model_folder, weights="base")


def test_a_pool_that_rewards_blind_answers_stops_the_run(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(SetupError, match="degenerate_limit"):
        finish(tmp_path, model_folder, "reward.degenerate_limit=0.05")


def test_a_fault_of_ours_is_counted_and_not_trained_on(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shared.tools.executor import ToolExecutor

    call = ToolExecutor.call

    def faulty(self: Any, request: Any) -> Any:
        if getattr(request, "tool", "") == "list_tables":
            raise ZeroDivisionError("ours")
        return call(self, request)

    monkeypatch.setattr(ToolExecutor, "call", faulty)
    line = finish(tmp_path, model_folder, "steps=1")[0]
    assert line["errors"] > 0
    assert line["episodes"] + line["errors"] == 24
    assert line["train_episodes"] <= line["episodes"]
