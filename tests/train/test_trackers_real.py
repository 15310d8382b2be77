"""tensorboard, wandb and trackio as they are: a run, its continuation, and what they then hold. No way out is open.

The run is a process of its own: these packages start threads and processes, and change the one they are loaded into.
"""

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.train.scripted_run import metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "train" / "scripted_run.py"
NAMES = ("tensorboard", "wandb", "trackio")
# Put into the run's process by Python itself: a connection to anywhere but this machine is noted and refused.
TRAP = """
import socket
_connect = socket.socket.connect
def connect(self, address):
    if isinstance(address, tuple) and not str(address[0]).startswith(("127.", "::1", "localhost")):
        with open({attempts!r}, "a") as lines:
            lines.write(str(address) + "\\n")
        raise OSError("no network here")
    return _connect(self, address)
socket.socket.connect = connect
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run of two steps, continued to four, with every tracker that is installed."""
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -e '.[trackers]'")
    folder = tmp_path_factory.mktemp("tracked")
    trap = folder / "trap"
    trap.mkdir()
    (trap / "sitecustomize.py").write_text(TRAP.format(attempts=str(folder / "attempts")))
    environment = os.environ | {"PYTHONPATH": f"{trap}:{ROOT}", "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    for name in ("WANDB_MODE", "WANDB_DIR", "TRACKIO_DIR", "TRACKIO_SPACE_ID"):
        environment.pop(name, None)
    for steps in (2, 4):
        _run(folder, model_folder, environment, f"steps={steps}")
    return folder


def _run(folder: Path, model: Path, environment: Mapping[str, str], *overrides: str) -> None:
    arguments = [str(folder), str(model), *overrides, "planned_steps=4", f"log.trackers=[{', '.join(NAMES)}]"]
    result = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "is off" not in result.stderr
    assert "left behind" not in result.stderr


def test_tensorboard_has_every_step_once(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked / "run" / "tensorboard"))
    events.Reload()
    for name in ("reward", "kl", "quantile", "seconds_rollout"):
        scalars = events.Scalars(name)
        assert [event.step for event in scalars] == [0, 1, 2, 3]
        assert [event.value for event in scalars] == pytest.approx([line[name] for line in metrics(tracked)], rel=1e-6)


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log after wandb's 7 bytes: 32 KiB blocks; checksum, length, kind before each piece."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield whole
            whole = b""


def test_wandb_is_offline_with_a_run_for_each_start(tracked: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[int]] = {}
    for path in sorted((tracked / "run" / "wandb").glob("offline-run-*/run-*.wandb")):
        name, steps = "", []
        for data in _log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                name = record.run.display_name
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                steps.append(int(items["step"]))
                assert json.loads(items["reward"]) == metrics(tracked)[steps[-1]]["reward"]
        found[name] = steps
    assert found == {"run": [0, 1], "run from step 2": [2, 3]}


def test_trackio_keeps_its_database_in_the_run(tracked: Path) -> None:
    (database,) = (tracked / "run" / "trackio").glob("*.db")
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows: list[Any] = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert [(run, step) for run, step, _ in rows] == [
        ("run", 0),
        ("run", 1),
        ("run from step 2", 2),
        ("run from step 2", 3),
    ]
    for _, step, text in rows:
        assert json.loads(text)["reward"] == metrics(tracked)[step]["reward"]


def test_nobody_outside_was_asked_and_nothing_is_left_at_home(tracked: Path) -> None:
    assert not (tracked / "attempts").exists(), (tracked / "attempts").read_text()
    assert not (tracked / "home").exists()
