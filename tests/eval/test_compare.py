"""Comparing two runs: the figures, what is refused, and the words."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.compare import compare, load_run, render
from eval.stats import mcnemar_exact
from shared.errors import SetupError
from tests.eval.runs import record, write_run

ROOT = Path(__file__).resolve().parents[2]


def outcomes(both: int, only_a: int, only_b: int, neither: int) -> tuple[list[float], list[float]]:
    a = [1.0] * both + [1.0] * only_a + [0.0] * only_b + [0.0] * neither
    b = [1.0] * both + [0.0] * only_a + [1.0] * only_b + [0.0] * neither
    return a, b


def write_pair(tmp_path: Path, a: list[float], b: list[float], **changes: Any) -> tuple[Path, Path]:
    def records(scores: list[float]) -> list[dict[str, Any]]:
        return [record(f"q{i}", score, db_id=f"db{i % 7}", **changes) for i, score in enumerate(scores)]

    return write_run(tmp_path / "a", records(a)), write_run(tmp_path / "b", records(b), mode="withheld")


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eval.compare", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_figures(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path, *outcomes(20, 12, 27, 41))
    result = compare(load_run(a), load_run(b))
    assert (result["n"], result["b"], result["c"]) == (100, 12, 27)
    assert result["p"] == mcnemar_exact(12, 27)
    assert result["delta"] == pytest.approx(0.15)
    assert (result["score_a"], result["score_b"]) == (pytest.approx(0.32), pytest.approx(0.47))
    assert result["ci"][0] < 0.15 < result["ci"][1]
    assert result["flip_rate"] == pytest.approx(0.39)
    assert result["rule"] == "bird_official"
    assert result["differs"] == ["mode"]
    assert result["verdict"].startswith("B is better than A by 15.0 points (95% CI +")
    assert "B - A" in render(result)


def test_the_other_way_round_mirrors_everything(tmp_path: Path) -> None:
    a, b = (load_run(folder) for folder in write_pair(tmp_path, *outcomes(20, 5, 30, 45)))
    there, back = compare(a, b), compare(b, a)
    assert (there["b"], there["c"], there["p"]) == (back["c"], back["b"], back["p"])
    assert there["delta"] == pytest.approx(-back["delta"])
    assert there["ci"] == pytest.approx([-back["ci"][1], -back["ci"][0]], abs=0.011)
    assert back["verdict"].startswith("A is better than B by 25.0 points")


def test_a_run_against_itself_shows_nothing(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path, *outcomes(30, 0, 0, 20))
    result = compare(load_run(a), load_run(b))
    assert (result["b"], result["c"], result["p"], result["ci"]) == (0, 0, 1.0, [0.0, 0.0])
    assert result["minimum_detectable_effect"] is None
    assert result["verdict"] == "No question was answered differently: A and B score the same on all 50."


def test_no_difference_says_what_could_have_been_seen(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path, *outcomes(100, 20, 24, 156))
    verdict = compare(load_run(a), load_run(b))["verdict"]
    assert verdict.startswith("No difference shown: B - A is +1.3 points")
    assert "would usually stay unseen at this n" in verdict


def test_strict_clusters_and_strata(tmp_path: Path) -> None:
    scores_a, scores_b = outcomes(10, 2, 18, 30)
    levels = ["simple", "challenging", ""]
    a = [record(f"q{i}", s, strict=0.0, db_id=f"db{i % 7}", difficulty=levels[i % 3]) for i, s in enumerate(scores_a)]
    b = [record(f"q{i}", s, strict=s, db_id=f"db{i % 7}", difficulty=levels[i % 3]) for i, s in enumerate(scores_b)]
    runs = load_run(write_run(tmp_path / "a", a)), load_run(write_run(tmp_path / "b", b))
    strict = compare(*runs, metric="strict", cluster=True, by_difficulty=True)
    assert (strict["metric"], strict["b"], strict["c"]) == ("strict", 0, 28)
    assert strict["bootstrap"]["unit"] == "cluster"
    assert strict["bootstrap"]["units"] == 7
    assert set(strict["by_difficulty"]) == {"(none)", "challenging", "simple"}
    assert sum(stratum["n"] for stratum in strict["by_difficulty"].values()) == 60
    assert all(stratum["p_holm"] >= stratum["p"] for stratum in strict["by_difficulty"].values())
    assert "challenging" in render(strict)


def test_an_interval_without_0_is_no_verdict_when_the_test_has_none(tmp_path: Path) -> None:
    result = compare(*map(load_run, write_pair(tmp_path, *outcomes(379, 4, 0, 17))))
    assert result["p"] == 0.125
    assert result["ci"][1] < 0
    assert result["verdict"].startswith("No difference shown: B - A is -1.0 points")
    assert "The interval leaves 0 out all the same" in result["verdict"]


def test_a_question_without_verdict_in_one_run_is_left_out_of_both(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [record("q0", 1.0), record("q1", None), record("q2", 0.0)])
    b = write_run(tmp_path / "b", [record("q0", 0.0), record("q1", 1.0), record("q2", 0.0)])
    result = compare(load_run(a), load_run(b))
    assert (result["n"], result["excluded"], result["b"], result["c"]) == (2, 1, 1, 0)
    assert "1 questions without a verdict" in render(result)


def test_samples_of_a_question_are_averaged_before_they_count(tmp_path: Path) -> None:
    a = [record("q0", s, sample=k) for k, s in enumerate([1.0, 0.0])] + [record("q1", 1.0, sample=k) for k in range(2)]
    b = [record("q0", 1.0, sample=k) for k in range(2)] + [record("q1", 1.0, sample=k) for k in range(2)]
    result = compare(load_run(write_run(tmp_path / "a", a)), load_run(write_run(tmp_path / "b", b)))
    assert (result["n"], result["b"], result["c"], result["delta"]) == (2, 0, 1, 0.25)


@pytest.mark.parametrize(
    ("b_records", "identity", "message"),
    [
        ([record("q0", 1.0), record("q9", 1.0)], {}, "answered different questions (1 only in"),
        ([record("q0", 1.0)], {}, "answered different questions (1 only in"),
        ([record("q0", 1.0), record("q1", 1.0)], {"data_sha256": "e" * 64}, "saw different data"),
        ([record("q0", None), record("q1", None)], {}, "different rules"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    tmp_path: Path, b_records: list[dict[str, Any]], identity: dict[str, Any], message: str
) -> None:
    a = write_run(tmp_path / "a", [record("q0", 1.0), record("q1", 0.0)])
    b = write_run(tmp_path / "b", b_records, **identity)
    result = cli(a, b)
    assert result.returncode == 2
    assert result.stderr.startswith("error: the runs")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_folders_that_are_no_finished_runs_are_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [record("q0", 1.0)])
    (tmp_path / "empty").mkdir()
    unfinished = write_run(tmp_path / "unfinished", [record("q0", 1.0)])
    (unfinished / "summary.json").unlink()
    for folder, message in (("none", "does not exist"), ("empty", "no finished run"), ("unfinished", "resume")):
        with pytest.raises(SetupError, match=message):
            compare(load_run(a), load_run(tmp_path / folder))


def test_nothing_scored_in_both_is_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [record("q0", 1.0), record("q1", None)])
    b = write_run(tmp_path / "b", [record("q0", None), record("q1", 1.0)])
    with pytest.raises(SetupError, match="nothing to compare"):
        compare(load_run(a), load_run(b))


def test_the_command(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path, *outcomes(20, 3, 17, 60))
    result = cli(a, b, "--json", "--seed", 3)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert {"n", "b", "c", "p", "delta", "ci", "verdict"} <= figures.keys()
    assert (figures["n"], figures["b"], figures["c"], figures["bootstrap"]["seed"]) == (100, 3, 17, 3)
    text = cli(a, b, "--by", "difficulty", "--cluster", "database").stdout
    assert "B is better than A by 14.0 points" in text
    assert "Besides the model, the runs differ in: mode." in text
