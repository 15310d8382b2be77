"""Runs as programs: signals, kills, ranks. Mostly marked slow: each start imports torch anew."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from tests.train.scripted_run import assert_same_run, finish, metrics
from train.checkpoint import newest_complete
from train.selection import read_validation
from train.stopping import EXIT_REQUEUE

Spawn = Callable[..., subprocess.Popen[str]]
PROGRAM = Path(__file__).parent / "scripted_run.py"
ROOT = Path(__file__).parents[2]


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
    assert found[0] == len(metrics(tmp_path))
    assert not list((tmp_path / "run").glob(".unfinished*"))


@pytest.mark.parametrize(("kills", "last"), [(2, 24), pytest.param(20, 80, marks=pytest.mark.slow)])
def test_kill_at_random_moments_then_resume_equals_the_uninterrupted_run(
    tmp_path: Path, model_folder: Path, spawn: Spawn, kills: int, last: int
) -> None:
    steps = (f"steps={last}", "checkpoint.every=1")
    whole = finish(tmp_path / "whole", model_folder, *steps)
    rng = random.Random(0)
    for kill in range(kills, 0, -1):
        process = spawn(tmp_path, model_folder, *steps)
        if kill % 5:
            # Some way into its second step: rollout, scoring, update or save.
            _wait_for_step(tmp_path, _finished(tmp_path) + 1, process)
            time.sleep(rng.uniform(0, 0.5))
        else:
            time.sleep(rng.uniform(0, 4))  # while it starts, or resumes
        assert process.poll() is None, "killed too late to be a kill"
        process.kill()
        process.communicate()
    process = spawn(tmp_path, model_folder, *steps)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert_same_run(metrics(tmp_path), whole)
    ours, theirs = (_weights(folder / "run" / f"checkpoint-step-{last}") for folder in (tmp_path, tmp_path / "whole"))
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())


def _finished(folder: Path) -> int:
    found = newest_complete(folder / "run")
    return found[0] if found else 0


RANKS = [
    ("ddp", 2),
    ("fsdp", 2),
    pytest.param("ddp", 3, marks=pytest.mark.slow),
    pytest.param("fsdp", 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("parallel", "ranks"), RANKS)
def test_ranks_change_nothing_but_rounding(
    tmp_path: Path, model_folder: Path, finished: Path, spawn: Spawn, parallel: str, ranks: int
) -> None:
    process = spawn(tmp_path, model_folder, f"parallel={parallel}", ranks=ranks)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    for ours, theirs in zip(metrics(tmp_path), metrics(finished), strict=True):
        assert ours["questions"] == theirs["questions"]
        for key in ("reward", "loss", "grad_norm", "kl", "train_tokens", "episodes"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-6), (ours["step"], key)
    ours_model, theirs_model = (_weights(folder / "run" / "checkpoint-step-5") for folder in (tmp_path, finished))
    for name, value in theirs_model.items():
        torch.testing.assert_close(ours_model[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_ranks_share_a_validation_and_agree_on_the_best(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    more = ("validation.every=2", "validation.benchmark=toy", "checkpoint.every=100", "steps=3")
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        process = spawn(folder, model_folder, *more, ranks=ranks)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
        lines = read_validation(folder / "run")
        assert [line["step"] for line in lines] == [0, 2, 3]
        assert [line["best"] for line in lines] == [False, True, False], "a script is as right at every step"
        assert lines[0]["withheld"]["questions"] == 5
        assert (folder / "run" / "best").resolve() == folder / "run" / "checkpoint-step-2"
        found.append([(line["score"], line["full"]["calls"]) for line in lines])
    assert found[0] == found[1]


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
    assert found[0] == len(metrics(tmp_path))
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@pytest.mark.slow
def test_two_ranks_train_adapters_as_one_does(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    for folder, ranks in ((tmp_path / "1", 1), (tmp_path / "2", 2)):
        process = spawn(folder, model_folder, "model.lora={rank: 4, alpha: 8}", ranks=ranks)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    ours, theirs = (_weights(tmp_path / part / "run" / "checkpoint-step-5") for part in ("2", "1"))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.slow
def test_sharding_goes_with_checkpointing_and_autocast(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    more = ("steps=2", "model.gradient_checkpointing=true")
    runs = (("2", "fsdp", "bfloat16", 2), ("1", "ddp", "bfloat16", 1), ("float32", "ddp", "none", 1))
    for name, parallel, autocast, ranks in runs:
        overrides = (*more, f"parallel={parallel}", f"model.autocast={autocast}")
        process = spawn(tmp_path / name, model_folder, *overrides, ranks=ranks)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    ours, theirs, exact = (metrics(tmp_path / name) for name, *_ in runs)
    # The same weights still: from then on bfloat16's rounding goes its own way.
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=0.01)
    for our, their, unrounded in zip(ours, theirs, exact, strict=True):
        rounding = abs(their["grad_norm"] - unrounded["grad_norm"])
        assert abs(our["grad_norm"] - their["grad_norm"]) < 0.5 * rounding, our["step"]
        assert our["loss"] == pytest.approx(their["loss"], rel=0.01, abs=1e-5)
        assert our["reward"] == pytest.approx(their["reward"])


@pytest.mark.slow
def test_a_run_may_change_between_sharded_and_whole(
    tmp_path: Path, model_folder: Path, finished: Path, spawn: Spawn
) -> None:
    legs = [("steps=2", "parallel=fsdp", 2), ("steps=3", "parallel=ddp", 1), ("steps=5", "parallel=fsdp", 3)]
    for steps, parallel, ranks in legs:
        process = spawn(tmp_path, model_folder, steps, "planned_steps=5", parallel, ranks=ranks)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == 0, stderr
    folders = [folder / "run" / "checkpoint-step-5" for folder in (tmp_path, finished)]
    ours, theirs = map(_weights, folders)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    moments = [torch.load(folder / "train_state.pt", weights_only=True)["optimizers"] for folder in folders]
    for part, state in moments[1].items():
        for index, values in state["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(moments[0][part]["state"][index][name], value, rtol=1e-2, atol=1e-5)


@pytest.mark.slow
def test_a_sharded_run_samples_from_a_whole_copy(tmp_path: Path, model_folder: Path, spawn: Spawn) -> None:
    # The script's own log-probs pass the gate only if the copy follows the shards: at lr 0.05 a stale one is far off.
    process = spawn(
        tmp_path, model_folder, "parallel=fsdp", "steps=3", "optimizer.lr=0.05", "gate.mean_gap=0.001", ranks=2
    )
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert len({line["weights"] for line in metrics(tmp_path)}) == 3


PHASES = ["rollout", "scoring", "sync", "update", "evaluation", "saving"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_in_any_phase_saves_and_the_next_start_goes_on(
    tmp_path: Path, model_folder: Path, spawn: Spawn, number: int
) -> None:
    more = ("steps=500", "checkpoint.every=2", "validation.every=2", "validation.benchmark=toy", "checkpoint.keep=2")
    done = 0
    for phase in PHASES:
        # One rank writes; while it does, it gets a second signal too.
        rank, times = ("0", 2) if phase == "saving" else ("1", 1)
        environment = {"SCRIPTED_SIGNAL": f"{phase} {int(number)} {times}", "SIGNALLED_RANK": rank}
        process = spawn(tmp_path, model_folder, *more, ranks=2, environment=environment)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode != 0, f"{phase}: the run went on\n{stderr}"
        # torchrun's own code is 1; its summary has the ranks'.
        assert set(re.findall(r"exitcode\s*: (-?\d+)", stderr)) <= {str(EXIT_REQUEUE), "-15"}, f"{phase}: {stderr}"
        assert f"exitcode  : {EXIT_REQUEUE}" in stderr, f"{phase}: {stderr}"
        assert 'scripted_run.py", line' not in stderr, f"{phase}: a rank fell\n{stderr}"
        found = newest_complete(tmp_path / "run")
        assert found is not None, phase
        steps = [line["step"] for line in metrics(tmp_path)]
        assert steps == list(range(found[0])), f"{phase}: logged {steps}, saved {found[0]}"
        assert found[0] > done, f"{phase}: nothing was added"
        if done:
            assert f"continuing at step {done + 1}" in stderr, f"{phase}: {stderr}"
        done = found[0]
        assert not list((tmp_path / "run").glob(".unfinished*")), phase
        alive = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout.split()
        assert not alive, f"{phase}: {alive} are left"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_rank_without_anything_to_train_on_takes_part(
    tmp_path: Path, model_folder: Path, spawn: Spawn, parallel: str
) -> None:
    environment = {"SCRIPTED_SILENT_RANK": "1", "COUNT_COLLECTIVES": str(tmp_path)}
    process = spawn(tmp_path, model_folder, "steps=2", f"parallel={parallel}", ranks=2, environment=environment)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    for line in metrics(tmp_path):
        assert line["groups_dropped"] >= 3
        assert line["empty"] == 0
        assert 0 < line["train_episodes"] <= 12
    first, second = ((tmp_path / f"rank-{rank}").read_text().splitlines() for rank in (0, 1))
    assert first == second, "both ranks make the same collective calls in the same order"
    assert first.count("gather_object") > 6


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return tensors
