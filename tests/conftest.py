"""What all tests share: one thread a process, no network, and where optional test data lies."""

import os
import socket
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: test processes share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from hypothesis import settings

settings.register_profile("execplan", deadline=None, derandomize=True, database=None)
settings.load_profile("execplan")

_LOOPBACK = ("127.", "::1", "localhost")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that reaches for anything but this machine fails, wherever the call sits."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOOPBACK):
            raise AssertionError(f"a test tried to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of extra benchmark data named by EXECPLAN_TEST_DATA (with data/ and scoring/); skips without it."""
    folder = os.environ.get("EXECPLAN_TEST_DATA")
    if not folder:
        pytest.skip("EXECPLAN_TEST_DATA is not set")
    path = Path(folder)
    if not (path / "data").is_dir():
        pytest.fail(f"EXECPLAN_TEST_DATA={folder} holds no data folder")
    return path
