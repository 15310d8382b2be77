"""Our vLLM server, started and stopped by the tests in a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.engines.vllm_here import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
MAX_LEN = 8192
START_SECONDS = 420


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[str]:
    """The base URL of a server of `model`."""
    with started(model, log, *flags) as (url, _):
        yield url


@contextlib.contextmanager
def started(model: Path, log: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """Base URL and process of a server; what it says goes to `log`. It is gone afterwards, children and all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "shared.engines.vllm_server", str(model), "--max-model-len", str(MAX_LEN), *flags]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1", process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
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
