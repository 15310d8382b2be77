"""The scoring benchmark runs, agrees with its other side, and prints its table. Its figures are not for tests."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.eval.runs import write_questions

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench/scoring.py", "--rounds", "1", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_generated_queries() -> None:
    result = run("--pairs", 60, "--samples", 2, "--episodes", 4)
    assert result.returncode == 0, result.stderr
    rows = [line.split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["| queries", "| light", "| heavy"]
    assert [int(row[1]) for row in rows[1:]] == [60, 6]
    assert 0 < int(rows[1][2]) < 60  # some answers are right and some are wrong
    assert "Harness: 4 episodes" in result.stdout


def test_a_question_file_with_several_databases(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "databases" / name).mkdir(parents=True)
        connection = sqlite3.connect(tmp_path / "databases" / name / f"{name}.sqlite")
        connection.executescript(f"CREATE TABLE t (a); INSERT INTO t VALUES ('{name}'), (CAST(x'ff' AS TEXT));")
        connection.close()
    golds = [(name, sql, "") for name in ("one", "two") for sql in ("SELECT a FROM t WHERE a < 'z'", "SELECT a FROM t")]
    write_questions(tmp_path / "questions.json", golds)
    result = run("--questions", tmp_path / "questions.json", "--databases", tmp_path / "databases")
    assert result.returncode == 0, result.stderr
    # Text that is not UTF-8 scores 0 on both sides, even against itself.
    row = result.stdout.splitlines()[-1].split(" | ")
    assert (row[1], row[2]) == ("32", "16")


@pytest.mark.parametrize("arguments", [["--pairs", "x"], ["--nope"]])
def test_bad_arguments(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def test_the_table_is_markdown() -> None:
    lines = run("--pairs", 20, "--samples", 1, "--episodes", 0).stdout.splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1
