"""The batch files, with pretended torchrun, srun and scontrol: signals reach the ranks, and then a job is requeued."""

import os
import shutil
import signal
import socket
import subprocess
import sys
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


# ---- training on one node, servers on others

SERVER = """
import http.server, sys
open(f"served-{sys.argv[sys.argv.index('--port') + 1]}", "w").write(" ".join(sys.argv[1:]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
# The job's first port is 20000 + 16 x this number.
JOB = "1873"
PORTS = [20000 + 16 * int(JOB), 20000 + 16 * int(JOB) + 1]


@pytest.fixture
def cluster(project: Path) -> Path:
    """Two nodes that are this machine; a server answers to nothing but /health, `srun` runs what it is told to here."""
    (project / "server.py").write_text(SERVER)
    program = f'[ "$1" = -c ] && exec {sys.executable} "$@"\nexec {sys.executable} server.py "${{@:3}}"'
    write_program(project / ".venv/bin/python", program)
    options = 'while [[ "$1" == --* ]]; do echo "$1" >> srun-options; shift; done\nexec "$@"'
    write_program(project / "srun", options)
    names = '[ "$1" = show ] && printf "localhost\\nlocalhost\\n" && exit'
    write_program(project / "scontrol", f'{names}\necho "$@" >> {project}/requeued')
    write_program(
        project / ".venv/bin/torchrun", 'echo "$@" > arguments\nenv > environment\n./rank &\nwait $! || exit 1'
    )
    (project / "configs").mkdir()
    shutil.copy(ROOT / "configs" / "grpo_curriculum.yaml", project / "configs")
    return project


def submit(project: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PATH": f"{project}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(project),
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "localhost,localhost",
        "SLURM_GPUS_ON_NODE": "2",
        **more,
    }
    command = ["bash", str(ROOT / "slurm" / "grpo_servers.sh"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until_ready(project: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not (project / "ready").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)


def listening(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def test_servers_come_first_training_gets_their_addresses_and_all_leave_together(cluster: Path) -> None:
    process = submit(cluster, "steps=600")
    wait_until_ready(cluster, process)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert (cluster / "saved").exists(), output
    assert (cluster / "requeued").read_text() == f"requeue {JOB}\n"
    assert process.returncode == 1, "that of torchrun whose ranks left with 75"
    arguments = (cluster / "arguments").read_text().split()
    assert arguments[-3:] == ["output=runs/grpo_curriculum", "rollout.engine=server", "steps=600"]
    environment = dict(line.partition("=")[::2] for line in (cluster / "environment").read_text().splitlines())
    assert environment["EXECPLAN_ROLLOUT_SERVERS"].split() == [f"http://localhost:{port}" for port in PORTS]
    assert "localhost" in environment["no_proxy"]
    for port in PORTS:
        served = (cluster / f"served-{port}").read_text().split()
        assert served[0] == "cwolff/qwen3.5-2b-grpo-sqale"
        assert served[served.index("--max-model-len") + 1] == "24576"
        assert not listening(port)
    assert "--nodelist=localhost" in (cluster / "srun-options").read_text().split()


def test_a_signal_while_servers_start_requeues(cluster: Path) -> None:
    (cluster / "server.py").write_text('import time\nopen("ready", "w").close()\ntime.sleep(60)')
    process = submit(cluster)
    wait_until_ready(cluster, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert (cluster / "requeued").read_text() == f"requeue {JOB}\n"
    assert not (cluster / "arguments").exists()


def test_a_server_that_ends_is_said_and_training_does_not_begin(cluster: Path) -> None:
    (cluster / "server.py").write_text("raise SystemExit(7)")
    output, _ = (process := submit(cluster)).communicate(timeout=60)
    assert process.returncode == 1
    assert "a server ended with status 7" in output
    assert "error: the servers of a node ended before they answered" in output
    assert not (cluster / "arguments").exists()
    assert not (cluster / "requeued").exists()


def test_one_node_is_refused(cluster: Path) -> None:
    write_program(cluster / "scontrol", "echo localhost")
    output, _ = (process := submit(cluster)).communicate(timeout=60)
    assert (process.returncode, output.count("\n")) == (2, 1)
    assert "servers need a node of their own" in output
