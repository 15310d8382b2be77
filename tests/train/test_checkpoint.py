"""Complete or not there: what counts as a checkpoint, and what survives a failure."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.errors import SetupError
from train import checkpoint
from train.checkpoint import MARKER, STATE, apply_retention, list_checkpoints, newest_complete, write_checkpoint


def _write(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"m" * 1000)
    (folder / STATE).write_bytes(b"s" * 500)


def _save(output: Path, step: int) -> Path:
    return write_checkpoint(output, step, _write)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _without_state(folder: Path) -> None:
    (folder / STATE).unlink()


def _half_model(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 500)


def _zero_state(folder: Path) -> None:
    os.truncate(folder / STATE, 0)


def _no_marker(folder: Path) -> None:
    (folder / MARKER).unlink()


def _broken_marker(folder: Path) -> None:
    (folder / MARKER).write_text('{"step": 20, "files": {"model')


def _marker_without_state(folder: Path) -> None:
    (folder / MARKER).write_text(json.dumps({"files": {"model.safetensors": 1000}}))


DAMAGE = [_empty, _without_state, _half_model, _zero_state, _no_marker, _broken_marker, _marker_without_state]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda function: function.__name__)
def test_a_damaged_newest_is_passed_over_with_a_reason(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _save(tmp_path, 10)
    damage(_save(tmp_path, 20))
    said: list[str] = []
    assert newest_complete(tmp_path, said.append) == (10, tmp_path / "checkpoint-step-10")
    assert len(said) == 1
    assert "checkpoint-step-20" in said[0]
    _save(tmp_path, 20)  # and it can be written again
    assert newest_complete(tmp_path) == (20, tmp_path / "checkpoint-step-20")


def test_steps_are_compared_as_numbers(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        _save(tmp_path, step)
    (tmp_path / "checkpoint-step-999.bak").mkdir()
    (tmp_path / "checkpoint-step-1000").write_text("a file")
    found = newest_complete(tmp_path)
    assert found is not None
    assert found[0] == 100


def test_nothing_to_resume(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) is None
    assert newest_complete(tmp_path / "absent") is None


def test_a_failing_write_leaves_the_old_one_and_no_trace(tmp_path: Path) -> None:
    _save(tmp_path, 10)

    def full(folder: Path) -> None:
        (folder / STATE).write_bytes(b"x")
        raise OSError(28, "No space left on device")

    with pytest.raises(SetupError, match="No space left"):
        write_checkpoint(tmp_path, 20, full)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-step-10"]


def test_a_full_disk_is_found_before_writing(tmp_path: Path) -> None:
    def never(folder: Path) -> None:
        raise AssertionError("must not start to write")

    with pytest.raises(SetupError, match="MiB free"):
        write_checkpoint(tmp_path, 20, never, bytes_needed=2**62)
    assert newest_complete(tmp_path) is None


def test_a_complete_one_is_not_written_twice(tmp_path: Path) -> None:
    folder = _save(tmp_path, 10)
    before = (folder / STATE).stat().st_mtime_ns
    _save(tmp_path, 10)
    assert (folder / STATE).stat().st_mtime_ns == before


def test_retention_keeps_the_newest_and_the_named_and_never_the_last_complete(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        _save(tmp_path, step)
    _no_marker(tmp_path / "checkpoint-step-5")
    deleted = apply_retention(tmp_path, keep=2, keep_steps=(1,))
    assert [path.name for path in deleted] == ["checkpoint-step-2"]
    assert [step for step, _, _ in list_checkpoints(tmp_path)] == [1, 3, 4, 5]
    for step in (3, 4):
        _half_model(tmp_path / f"checkpoint-step-{step}")
    assert apply_retention(tmp_path, keep=1) == []
    assert newest_complete(tmp_path) == (1, tmp_path / "checkpoint-step-1")


_ENDLESS_SAVES = """
import sys
from pathlib import Path
from train.checkpoint import STATE, apply_retention, write_checkpoint

def write(folder):
    for name in ("model.safetensors", STATE):
        with open(folder / name, "wb") as file:
            for _ in range(40):
                file.write(b"x" * 20_000)
                file.flush()

output = Path(sys.argv[1])
step = int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    write_checkpoint(output, step, write)
    apply_retention(output, 2)
"""


def test_kill_at_random_moments_of_a_save_is_always_resumable(tmp_path: Path) -> None:
    rng = random.Random(0)
    last = 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", _ENDLESS_SAVES, str(tmp_path), str(last)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = newest_complete(tmp_path)
        if last:
            assert found is not None, "the only complete checkpoint is gone"
        last = max(last, found[0] if found else 0)
    assert last > 0
    checkpoint.remove_unfinished(tmp_path)
    assert all(path.name.startswith("checkpoint-step-") for path in tmp_path.iterdir())
