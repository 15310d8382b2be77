"""The batch file, with pretended torchrun and scontrol: signals reach the ranks, and only then is the job requeued."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that looks like the project to the batch file; its rank leaves with 75 on USR1, torchrun then with 1."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    write_program(
        tmp_path / "rank",
        "trap 'echo saved >> saved; exit 75' USR1\ntouch ready\nfor _ in $(seq 200); do sleep 0.05; done\nexit 3",
    )
    write_program(tmp_path / ".venv/bin/torchrun", 'echo "$@" > arguments\n./rank &\nwait $! || exit 1')
    write_program(tmp_path / "scontrol", f'echo "$@" >> {tmp_path}/requeued')
    shutil.copytree(ROOT / "slurm", tmp_path / "slurm", ignore=shutil.ignore_patterns("*.log"))
    return tmp_path


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    path = f"{project}:{os.environ['PATH']}"
    env = {
        **os.environ,
        "PATH": path,
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_ID": "77",
        "SLURM_CPUS_PER_TASK": "24",
    }
    command = ["bash", str(ROOT / "slurm" / "grpo_curriculum.sh"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_ranks_and_the_job_is_requeued(project: Path, number: signal.Signals) -> None:
    process = start(project, "steps=600")
    deadline = time.monotonic() + 30
    while not (project / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (project / "saved").exists(), output
    assert (project / "requeued").read_text() == "requeue 77\n"
    arguments = (project / "arguments").read_text().split()
    assert arguments[-3:] == ["configs/grpo_curriculum.yaml", "output=runs/grpo_curriculum", "steps=600"]
    assert arguments[:3] == ["--standalone", "--nproc-per-node", "3"]


def test_a_run_that_fails_by_itself_is_not_requeued(project: Path) -> None:
    write_program(project / ".venv/bin/torchrun", "exit 4")
    process = start(project)
    process.communicate(timeout=30)
    assert process.returncode == 4
    assert not (project / "requeued").exists()


def test_without_an_environment_it_says_so(project: Path) -> None:
    shutil.rmtree(project / ".venv")
    process = start(project)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2
    assert output.count("\n") == 1
    assert "bash scripts/test.sh" in output
