"""Trackers may be missing, raise, end the program, hang or find no folder: the run goes on and its own log is whole."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shared.config import build_config
from shared.errors import SetupError
from tests.train import scripted_run as scripted
from tests.train.scripted_run import assert_same_run, finish, metrics
from train.config import TrainConfig
from train.trackers import numbers, open_trackers

STEPS = ("steps=2", "planned_steps=5")


class FakeTracker(ModuleType):
    """A stand-in for wandb or trackio that remembers what it was given, and misbehaves when told to."""

    def __init__(self, name: str, failure: Any = None, where: str = "log") -> None:
        super().__init__(name)
        self.failure, self.where = failure, where
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def _at(self, where: str) -> None:
        if where == self.where and self.failure is not None:
            if isinstance(self.failure, threading.Event):
                self.failure.wait()
            else:
                raise self.failure

    def init(self, **settings: Any) -> "FakeTracker":
        self._at("init")
        self.begun.append(settings)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self._at("log")
        self.logged.append((step, figures))

    def finish(self) -> None:
        self._at("finish")
        self.finished += 1


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_what_a_tracker_gets(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("WANDB_MODE", "TRACKIO_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, "mine")
    fake = FakeTracker(name)
    monkeypatch.setitem(sys.modules, name, fake)
    lines = finish(tmp_path, model_folder, *STEPS, f"log.trackers=[{name}]")
    assert [step for step, _ in fake.logged] == [0, 1]
    for (_, logged), line in zip(fake.logged, lines, strict=True):
        assert logged["reward"] == line["reward"]
        assert logged["skipped/gold_empty"] == line["skipped"]["gold_empty"] if line["skipped"] else True
        assert all(isinstance(value, float) for value in logged.values())
    assert fake.finished == 1
    assert fake.begun[0]["config"]["optimizer"]["lr"] == 1e-3
    # Continued: another run of the same group, which begins where the first ended.
    finish(tmp_path, model_folder, "steps=3", "planned_steps=5", f"log.trackers=[{name}]")
    assert [begun["name"] for begun in fake.begun] == ["run", "run from step 2"]
    assert {begun["group"] for begun in fake.begun} == {"run"}
    assert [step for step, _ in fake.logged] == [0, 1, 2]


FAILURES = [
    (RuntimeError("no server"), "init"),
    (ConnectionError("gone"), "log"),
    (SystemExit(1), "log"),
    (OSError(30, "Read-only file system"), "init"),
    (ValueError("late"), "finish"),
]


@pytest.mark.parametrize(("failure", "where"), FAILURES, ids=[f"{type(f).__name__}-{w}" for f, w in FAILURES])
def test_a_tracker_that_fails_is_switched_off_and_nothing_else_changes(
    tmp_path: Path,
    model_folder: Path,
    finished: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    where: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeTracker("wandb", failure, where))
    lines = finish(tmp_path, model_folder, *STEPS, "log.trackers=[wandb]")
    assert_same_run(lines, metrics(finished)[:2])
    said = capsys.readouterr().err
    assert said.count("tracker wandb is off, training goes on") == 1
    assert type(failure).__name__ in said


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    said: list[str] = []
    (tracker,) = open_trackers((name,), tmp_path, "p", {}, 0, said.append)  # type: ignore[arg-type]
    tracker.log(0, {"a": 1.0})
    tracker.close()
    assert len(said) == 1
    assert said[0].startswith(f"tracker {name} is off, training goes on: it is not installed")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: threading.Event, where: str
) -> None:
    monkeypatch.setattr("train.trackers._LEAVE_AFTER", 0.4)
    monkeypatch.setattr("train.trackers._WAITING", 2)
    monkeypatch.setitem(sys.modules, "wandb", FakeTracker("wandb", hang, where))
    said: list[str] = []
    (tracker,) = open_trackers(("wandb",), tmp_path, "p", {}, 0, said.append)
    started = time.monotonic()
    for step in range(50):
        tracker.log(step, {"a": 1.0})
    assert time.monotonic() - started < 0.3, "handing over never waits"
    tracker.close()
    assert time.monotonic() - started < 5
    assert "left behind" in said[0]
    if where != "finish":
        assert "lost the figures of" in said[1]


def test_a_folder_that_takes_no_files(tmp_path: Path) -> None:
    """As root nothing is read-only, so the folder is a file."""
    (tmp_path / "run").write_text("in the way")
    said: list[str] = []
    (tracker,) = open_trackers(("tensorboard",), tmp_path / "run", "p", {}, 0, said.append)
    tracker.close()
    assert "tracker tensorboard is off" in said[0]


def test_only_numbers_go_to_a_tracker() -> None:
    figures = {"a": 1, "b": {"c": 2.5, "d": "text"}, "e": True, "f": None, "g": [1, 2]}
    assert numbers(figures, "x/") == {"x/a": 1.0, "x/b/c": 2.5}


def test_an_unknown_tracker_is_refused() -> None:
    data = {"output": "x", "model": {"path": "a/b"}, "data": {"benchmark": "toy"}, "log": {"trackers": ["mlflow"]}}
    with pytest.raises(SetupError, match=r"log\.trackers"):
        build_config(data, TrainConfig, "test")


def test_a_run_opens_no_connection_and_ends_at_once(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outbound sockets raise and are noted; the real tensorboard and wandb, where installed, are asked for too."""
    attempts: list[Any] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            attempts.append(address)
            raise OSError("no network here")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = scripted.make_config(tmp_path, model_folder, [*STEPS, "log.trackers=[tensorboard, wandb]"])
    assert scripted.run(config, tmp_path) == 0
    assert time.time() - (tmp_path / "run" / "metrics.jsonl").stat().st_mtime < 10
    assert attempts == []
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]
    assert not (tmp_path / "home").exists()


def test_the_local_log_has_the_formula_s_quantile(finished: Path) -> None:
    """With k 2 and all quantiles equally frequent: 1/2 + (coth a - 1/a) / 2 with a = 2 (2p - 1), p = step / 4."""
    found = [line["quantile_expected"] for line in metrics(finished)]
    assert found == pytest.approx([0.231, 0.343, 0.5, 0.657, 0.769], abs=0.02)
