"""The README's commands exist as written: every program, every flag, every file of the project that it names."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted({line.split("   ")[0].strip() for block in BLOCKS for line in block.splitlines()})
PYTHON = [line for line in COMMANDS if re.search(r"python (-m )?\S+|torchrun .* -m ", line)]


@cache
def help_text(*program: str) -> str:
    result = subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_there_are_commands() -> None:
    assert len(PYTHON) >= 4


@pytest.mark.parametrize("line", PYTHON)
def test_programs_and_flags_exist(line: str) -> None:
    words = line.split()
    if "-m" in words:
        start = words.index("-m") + 2
        text = help_text("-m", words[start - 1])
    else:
        start = words.index("python") + 2
        text = help_text(words[start - 1])
    known = set(re.findall(r"--[a-z][a-z-]+", text))
    assert {word for word in words[start:] if word.startswith("--")} <= known


@pytest.mark.parametrize("line", [line for line in COMMANDS if ".sh" in line])
def test_shell_files_exist(line: str) -> None:
    for name in re.findall(r"\S+\.sh", line):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"(?:configs|scripts|shared|slurm|train|eval)/[\w/]+\.\w+", README)))
)
def test_files_named_exist(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 200
