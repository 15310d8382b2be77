"""The demo's front door (what it refuses), its last page, and, marked slow, a few steps of everything."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("demo_report", ROOT / "scripts" / "demo_report.py")
assert _spec is not None
assert _spec.loader is not None
demo_report = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo_report)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def demo(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/demo.sh", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "arguments", [["--seed"], ["--seed", "x"], ["--seed", "-1"], ["--seed", "1.5"], ["--sede", "1"]]
)
def test_wrong_arguments_are_one_line(checkout: Path, arguments: list[str]) -> None:
    result = demo(checkout, *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "usage: bash scripts/demo.sh [--seed N]" in result.stderr
    assert not (checkout / "runs").exists()
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("name", "message"), [("report.txt", "holds a finished demo"), ("thesis.txt", "holds something that is no demo")]
)
def test_a_folder_in_use_is_one_line(checkout: Path, name: str, message: str) -> None:
    used = checkout / "runs" / "demo-seed3"
    used.mkdir(parents=True)
    (used / name).write_text("mine")
    result = demo(checkout, "--seed", "3")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr
    assert "--seed" in result.stderr
    assert [path.name for path in used.iterdir()] == [name]
    assert not (checkout / ".venv").exists()


def test_help_is_the_head_of_the_file(checkout: Path) -> None:
    result = demo(checkout, "--help")
    assert result.returncode == 0
    assert "bash scripts/demo.sh [--seed N]" in result.stdout
    assert "set -euo" not in result.stdout


def write_run(folder: Path, answers: list[str], official: float) -> None:
    folder.mkdir(parents=True)
    scores: dict[str, Any] = {"official": official, "strict": official, "n": len(answers)}
    rates = dict.fromkeys(("submit_rate", "executes_rate", "mean_turns", "mean_calls"), 1.0)
    (folder / "summary.json").write_text(json.dumps({**scores, **rates, "by_difficulty": {"join": scores}}))
    episodes = [
        {"question_id": f"q{i}", "sample": 0, "answer_sql": sql, "origin": "submitted", "ids": [1, 2]}
        for i, sql in enumerate(answers)
    ]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes))


def finished_demo(folder: Path, export_answers: list[str]) -> Path:
    write_run(folder / "before", ["SELECT 0", "SELECT 2"], 0.25)
    write_run(folder / "after", ["SELECT 1", "SELECT 2"], 0.75)
    write_run(folder / "export-answers", export_answers, 0.75)
    write_run(folder / "before-sampled", ["SELECT 0", "SELECT 2"], 0.125)
    write_run(folder / "after-sampled", ["SELECT 1", "SELECT 2"], 0.625)
    comparison = {"n": 2, "b": 0, "c": 1, "p": 1e-12, "delta": 0.5, "ci": [0.4, 0.6]}
    (folder / "compare-sampled.json").write_text(json.dumps(comparison | {"p": 0.25}))
    (folder / "compare.json").write_text(json.dumps(comparison))
    (folder / "phases.tsv").write_text("warm start\t100\nGRPO\t23\n")
    return folder


def test_the_last_page_shows_gain_interval_p_and_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_demo(tmp_path / "demo", ["SELECT 1", "SELECT 2"])
    assert demo_report.main([str(run)]) == 0
    page = capsys.readouterr().out
    greedy, sampled = ("25.0%", "75.0%", "+50.0 points", "+40.0 to +60.0", "1.0e-12"), ("12.5%", "62.5%", "0.2500")
    for figure in (*greedy, *sampled, "123", "token by token, on all 2"):
        assert figure in page
    assert "+50.0 points" in (run / "report.txt").read_text()


def test_an_export_that_answers_differently_fails_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_demo(tmp_path / "demo", ["SELECT 1", "SELECT 3"])
    assert demo_report.main([str(run)]) == 1
    assert "answers 1 questions differently, q1 for one" in capsys.readouterr().out
    assert not (run / "report.txt").exists()


def test_answers_to_different_questions_are_no_comparison(tmp_path: Path) -> None:
    run = finished_demo(tmp_path / "demo", ["SELECT 1"])
    with pytest.raises(SetupError, match="different questions"):
        demo_report.main([str(run)])


@pytest.mark.slow
def test_a_few_steps_of_everything() -> None:
    """The wiring from the toy data to the export's answers; whether it learns is for the demo itself to show."""
    if not (ROOT / ".venv" / ".stamp").exists():
        pytest.skip("the demo runs in .venv, which scripts/test.sh makes")
    run = ROOT / "runs" / "demo-seed999999999-quick"
    shutil.rmtree(run, ignore_errors=True)
    try:
        command = ["bash", "scripts/demo.sh", "--quick", "--seed", "999999999"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert result.returncode == 0, result.stdout + result.stderr
        comparison = json.loads((run / "compare.json").read_text())
        assert {"n", "b", "c", "p", "delta", "ci"} <= set(comparison)
        assert comparison["n"] == 60
        for page in ("episodes.html", "training.html"):
            assert (run / page).read_text().startswith("<!doctype html>")
        assert "token by token, on all 60 questions" in (run / "report.txt").read_text()
    finally:
        shutil.rmtree(run, ignore_errors=True)
