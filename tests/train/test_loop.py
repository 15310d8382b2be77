"""Whole runs with scripted episodes: files, resuming, stopping, ranks, and what stops a run."""

import contextlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from shared.config import load_config
from shared.errors import SetupError
from train.checkpoint import newest_complete
from train.config import TrainConfig
from train.run import main
from train.stopping import EXIT_REQUEUE, STOP_FILE, only_one

Spawn = Callable[..., subprocess.Popen[str]]
PROGRAM = Path(__file__).parent / "scripted_run.py"
ROOT = Path(__file__).parents[2]


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


scripted = _load("scripted_run", PROGRAM)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def _run(folder: Path, model: Path, *overrides: str, **more: Any) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    assert scripted.run(scripted.make_config(folder, model, overrides), folder, **more) == 0
    return _metrics(folder)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts runs as programs, each in a process group of its own, which is gone after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: Any, **more: Any) -> subprocess.Popen[str]:
        started.append(_spawn(*arguments, **more))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _spawn(
    folder: Path, model: Path, *overrides: str, ranks: int = 1, environment: Mapping[str, str] = MappingProxyType({})
) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable]
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*launcher, str(PROGRAM), str(folder), str(model), *overrides],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(environment),
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for_step(folder: Path, steps: int, process: subprocess.Popen[str]) -> None:
    path = folder / "run" / "metrics.jsonl"
    for _ in range(2400):
        if path.exists() and path.read_text().count("\n") >= steps:
            return
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        time.sleep(0.05)
    raise AssertionError("no step in two minutes")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """An uninterrupted run of five steps."""
    folder = tmp_path_factory.mktemp("finished")
    _run(folder, model_folder)
    return folder


def test_a_run_leaves_what_it_promises(finished: Path) -> None:
    lines = _metrics(finished)
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
    lines = _metrics(finished)
    assert all("q23" not in line["questions"] for line in lines)
    assert sum(line["skipped"].get("gold_empty", 0) for line in lines) > 0


def test_the_kl_coefficient_follows_the_target(finished: Path) -> None:
    lines = _metrics(finished)
    assert lines[0]["kl_coefficient"] == 0.02
    assert lines[1]["kl_coefficient"] == pytest.approx(0.02 * 0.98)
    assert lines[-1]["kl_coefficient"] > lines[1]["kl_coefficient"]


def test_starting_a_finished_run_again_does_nothing(finished: Path, model_folder: Path) -> None:
    before = _metrics(finished)
    assert _run(finished, model_folder) == before


def _same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    keys = ("step", "questions", "quantile", "reward", "weights", "kl_coefficient", "lr")
    assert [{key: line.get(key) for key in keys} for line in ours] == [
        {key: line.get(key) for key in keys} for line in theirs
    ]


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, model_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    """STOP appears during the rollouts of a step: that step is given up, and done again after the resume."""
    config = scripted.make_config(tmp_path, model_folder)
    text = scripted.ScriptedPolicy._text

    def stopping(self: Any, request: Any) -> str:
        done = len(_metrics(tmp_path)) if (tmp_path / "run" / "metrics.jsonl").exists() else 0
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
    _same(_run(tmp_path, model_folder), _metrics(finished))


def test_other_data_or_seed_is_not_continued(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path, model_folder, "steps=1")
    with pytest.raises(SetupError, match="seed 0, the config says 1"):
        _run(tmp_path, model_folder, "seed=1")
    pool = scripted.shop_pool
    monkeypatch.setattr(scripted, "shop_pool", lambda folder: pool(folder, 20))
    with pytest.raises(SetupError, match="another question pool"):
        _run(tmp_path, model_folder)


@pytest.mark.parametrize("budget", [1, 1000])
def test_the_micro_batch_budget_changes_nothing_but_rounding(
    tmp_path: Path, model_folder: Path, finished: Path, budget: int
) -> None:
    lines = _run(tmp_path, model_folder, f"loss.micro_batch_tokens={budget}", "steps=2", "planned_steps=5")
    for ours, theirs in zip(lines, _metrics(finished)[:2], strict=True):
        for key in ("loss", "grad_norm", "kl", "ratio_mean"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), key


def test_checkpointing_and_two_inner_epochs_run(tmp_path: Path, model_folder: Path) -> None:
    lines = _run(tmp_path, model_folder, "steps=2", "model.gradient_checkpointing=true", "loss.inner_epochs=2")
    assert lines[1]["kl"] > 0


def test_without_kl_no_reference_is_kept(tmp_path: Path, model_folder: Path) -> None:
    lines = _run(tmp_path, model_folder, "steps=1", "loss.kl.mode=off", "optimizer.name=muon")
    assert lines[0]["kl"] == lines[0]["kl_coefficient"] == 0


def test_a_step_without_signal_is_logged_as_empty_and_changes_nothing(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted.ScriptedPolicy, "_text", lambda self, request: "I cannot")
    lines = _run(tmp_path, model_folder, "steps=2")
    assert [line["empty"] for line in lines] == [1.0, 1.0]
    assert lines[0]["weights"] == lines[1]["weights"]
    assert lines[0]["groups_dropped"] == 6
    assert all(value is not None for line in lines for value in line.values())


def test_the_gate_stops_before_the_first_update_and_says_the_figures(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(
        SetupError, match=r"gate, step 0: mean \|trainer - sampler\| is 0\.0500.*limit gate\.mean_gap is 0\.02"
    ):
        _run(tmp_path, model_folder, gap=0.05)
    assert newest_complete(tmp_path / "run") is None
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_in_progress_keeps_its_folder(tmp_path: Path, model_folder: Path) -> None:
    with only_one(tmp_path / "run"), pytest.raises(SetupError, match="in use by another run"):
        _run(tmp_path, model_folder)


def test_episodes_of_other_weights_are_refused(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(RuntimeError, match="sampled from weights base, the trainer holds"):
        _run(tmp_path, model_folder, weights="base")


def test_a_pool_that_rewards_blind_answers_stops_the_run(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(SetupError, match="degenerate_limit"):
        _run(tmp_path, model_folder, "reward.degenerate_limit=0.05")


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
    line = _run(tmp_path, model_folder, "steps=1")[0]
    assert line["errors"] > 0
    assert line["episodes"] + line["errors"] == 24
    assert line["train_episodes"] <= line["episodes"]


SIGNALS = [(signal.SIGTERM, EXIT_REQUEUE), (signal.SIGUSR1, EXIT_REQUEUE), (signal.SIGINT, 130)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_save_and_leave(tmp_path: Path, model_folder: Path, spawn: Spawn, number: int, code: int) -> None:
    process = spawn(tmp_path, model_folder, "steps=500", "checkpoint.every=1000")
    _wait_for_step(tmp_path, 2, process)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    found = newest_complete(tmp_path / "run")
    assert found is not None
    assert found[0] == len(_metrics(tmp_path))
    assert not list((tmp_path / "run").glob(".unfinished*"))


@pytest.mark.slow
def test_kill_at_random_moments_then_resume_equals_the_uninterrupted_run(
    tmp_path: Path, model_folder: Path, finished: Path, spawn: Spawn
) -> None:
    rng = random.Random(0)
    kills = 0
    while True:
        process = spawn(tmp_path, model_folder, "checkpoint.every=1")
        before = len(_metrics(tmp_path)) if (tmp_path / "run" / "metrics.jsonl").exists() else 0
        try:
            process.communicate(timeout=5 + rng.uniform(0, 3) if kills < 20 else 120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            assert kills < 40, f"no progress: {before}"
            continue
        assert process.returncode == 0
        break
    _same(_metrics(tmp_path), _metrics(finished))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_change_nothing_but_rounding(
    tmp_path: Path, model_folder: Path, finished: Path, spawn: Spawn, ranks: int
) -> None:
    process = spawn(tmp_path, model_folder, ranks=ranks)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    for ours, theirs in zip(_metrics(tmp_path), _metrics(finished), strict=True):
        assert ours["questions"] == theirs["questions"]
        for key in ("reward", "loss", "grad_norm", "kl", "train_tokens", "episodes"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), (ours["step"], key)
    ours_model, theirs_model = (_weights(folder / "run" / "checkpoint-step-5") for folder in (tmp_path, finished))
    for name, value in theirs_model.items():
        torch.testing.assert_close(ours_model[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_takes_both_out(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    process = spawn(tmp_path, model_folder, "steps=500", "checkpoint.every=1000", ranks=2)
    _wait_for_step(tmp_path, 1, process)
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    ranks = [int(pid) for pid in children if PROGRAM.name in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGUSR1)
    process.communicate(timeout=60)
    found = newest_complete(tmp_path / "run")
    assert found is not None
    assert found[0] == len(_metrics(tmp_path))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
def test_a_rank_without_anything_to_train_on_takes_part(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    process = spawn(tmp_path, model_folder, "steps=2", ranks=2, environment={"SCRIPTED_SILENT_RANK": "1"})
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    for line in _metrics(tmp_path):
        assert line["groups_dropped"] >= 3
        assert line["empty"] == 0
        assert 0 < line["train_episodes"] <= 12


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors


def _no_model(folder: Path, model: Path) -> list[str]:
    return [f"model.path={folder / 'nowhere'}"]


def _no_tokenizer(folder: Path, model: Path) -> list[str]:
    copy = folder / "model"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((model / name).read_bytes())
    return [f"model.path={copy}"]


def _no_template(folder: Path, model: Path) -> list[str]:
    copy = folder / "model"
    copy.mkdir()
    for path in model.iterdir():
        if path.name != "chat_template.jinja":
            (copy / path.name).write_bytes(path.read_bytes())
    return [f"model.path={copy}"]


def _in_use(folder: Path, model: Path) -> list[str]:
    (folder / "used").mkdir()
    (folder / "used" / "thesis.txt").write_text("mine")
    return [f"output={folder / 'used'}"]


def _small_pool(folder: Path, model: Path) -> list[str]:
    return ["data.limit=5"]


def _unknown_difficulty(folder: Path, model: Path) -> list[str]:
    return ["data.difficulties=[extreme]"]


BAD_INPUT = [
    (_no_model, "nowhere is neither a folder nor a hub id"),
    (_no_tokenizer, "has no tokenizer"),
    (_no_template, "has no chat template"),
    (_in_use, "holds other files and no run"),
    (_small_pool, "the pool has 5 questions, a step draws 18"),
    (_unknown_difficulty, "no question is 'extreme'"),
]


@pytest.mark.parametrize(("prepare", "message"), BAD_INPUT, ids=[function.__name__ for function, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(
    tmp_path: Path, model_folder: Path, prepare: Callable[[Path, Path], list[str]], message: str
) -> None:
    scripted.shop_pool(tmp_path)
    (tmp_path / "db" / "shop").mkdir(parents=True)
    (tmp_path / "shop.sqlite").rename(tmp_path / "db" / "shop" / "shop.sqlite")
    questions = [{"db_id": "shop", "question": f"q{i}", "query": "SELECT 1", "difficulty": "simple"} for i in range(30)]
    (tmp_path / "q.json").write_text(json.dumps(questions))
    (tmp_path / "c.yaml").write_text(
        f"output: {tmp_path / 'run'}\nmodel: {{path: {model_folder}}}\n"
        f"data: {{benchmark: questions, questions: {tmp_path / 'q.json'}, databases: {tmp_path / 'db'}}}\n"
    )
    overrides = prepare(tmp_path, model_folder)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(SetupError, match=message) as error:
        main(["--config", str(tmp_path / "c.yaml"), *overrides])
    assert "\n" not in str(error.value)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
