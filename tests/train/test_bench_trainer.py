"""The trainer's benchmark at a size that takes seconds: it runs, its sides agree, its table has every side."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "bench" / "trainer.py"
STEP = ("step", "--rows", "4", "--longest", "200", "--vocabulary", "2000", "--trl-rows", "4", "--repeats", "1")
LOGPROBS = ("logprobs", "--tokens", "256", "--hidden", "32", "--vocabulary", "8000", "--chunk", "16", "--repeats", "1")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False)


def test_chunks_against_full() -> None:
    done = _run(*LOGPROBS)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row.split("|")[1].strip() for row in rows] == ["full", "chunks of 16"]


@pytest.mark.slow
def test_our_step_against_trl() -> None:
    done = _run(*STEP)
    assert done.returncode == 0, done.stderr
    assert "on all sides" in done.stdout
    assert "| TRL, 4 rows at a time |" in done.stdout


def test_rows_that_do_not_divide_are_refused() -> None:
    done = _run("step", "--rows", "4", "--longest", "100", "--vocabulary", "50", "--trl-rows", "3", "--repeats", "1")
    assert done.returncode == 2
    assert "--trl-rows 3 does not divide --rows 4" in done.stderr
