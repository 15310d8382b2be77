"""A disk that fills up, for real: a run whose folder is on a tmpfs of 50 MB."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from tests.train import scripted_run as scripted
from tests.train.scripted_run import assert_same_run, finish, metrics
from train import state
from train.checkpoint import newest_complete


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def _fill(folder: Path, leave: int) -> Path:
    """Take all of the disk's space but `leave` bytes."""
    filler = folder / "someone-else"
    with filler.open("ab") as file:
        file.write(b"x" * max(shutil.disk_usage(folder).free - leave, 0))
    return filler


def _nothing_half(run: Path, step: int) -> None:
    found = newest_complete(run)
    assert found is not None
    assert found[0] == step, "the older checkpoint is the one to go on from"
    assert [path.name for path in run.glob("*checkpoint-step-*")] == [f"checkpoint-step-{step}"]


def test_too_little_space_is_found_before_a_save(small_disk: Path, model_folder: Path, finished: Path) -> None:
    finish(small_disk, model_folder, "steps=2", "planned_steps=5")
    filler = _fill(small_disk, leave=10 * 2**20)
    with pytest.raises(SetupError, match=r"has \d+ MiB free, \d+ MiB are needed; free some space"):
        finish(small_disk, model_folder)
    _nothing_half(small_disk / "run", 2)
    filler.unlink()
    assert_same_run(finish(small_disk, model_folder), metrics(finished))


@pytest.mark.parametrize("leave", [0, 100_000, 700_000], ids=["at once", "in the weights", "in the optimizer"])
def test_a_disk_that_fills_up_during_a_save_costs_that_save_alone(
    small_disk: Path, model_folder: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, leave: int
) -> None:
    finish(small_disk, model_folder, "steps=2", "planned_steps=5")
    save = state.save_policy

    def late(*arguments: Any, **more: Any) -> None:
        _fill(small_disk, leave)
        save(*arguments, **more)

    monkeypatch.setattr(state, "save_policy", late)
    with pytest.raises(SetupError, match="checkpoint of step 4 could not be written"):
        finish(small_disk, model_folder)
    _nothing_half(small_disk / "run", 2)
    monkeypatch.setattr(state, "save_policy", save)
    (small_disk / "someone-else").unlink()
    assert_same_run(finish(small_disk, model_folder), metrics(finished))


def test_the_programs_exit_code_says_it(small_disk: Path, model_folder: Path) -> None:
    finish(small_disk, model_folder, "steps=2", "planned_steps=5")
    _fill(small_disk, leave=2**20)
    with pytest.raises(SetupError) as error:
        scripted.run(scripted.make_config(small_disk, model_folder), small_disk)
    assert "\n" not in str(error.value)
