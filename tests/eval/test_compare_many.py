"""Comparisons of many runs, of runs with samples, and the noise floor."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.compare import compare, compare_all, load_run, render
from eval.compare_text import names, render_matrix, verdict_name
from eval.stats import holm
from shared.errors import SetupError
from tests.eval.runs import record, write_run
from tests.eval.test_compare import cli


def write(tmp_path: Path, name: str, scores: Sequence[float], **identity: Any) -> Path:
    records = [record(f"q{i}", s, db_id=f"db{i % 4}", difficulty="ab"[i % 2]) for i, s in enumerate(scores)]
    return write_run(tmp_path / name, records, model=name, model_sha256=name, **identity)


def write_many(tmp_path: Path) -> list[Path]:
    """Four runs over 200 questions: two alike, one better, one the second seed of the first."""
    rng = random.Random(1)
    base = [float(rng.random() < 0.4) for _ in range(200)]
    alike = [1 - s if rng.random() < 0.1 else s for s in base]
    better = [1.0 if rng.random() < 0.3 else s for s in base]
    again = [1 - s if rng.random() < 0.08 else s for s in base]
    runs = [write(tmp_path, name, scores) for name, scores in (("a", base), ("b", alike), ("c", better))]
    records = [record(f"q{i}", s, db_id=f"db{i % 4}", difficulty="ab"[i % 2]) for i, s in enumerate(again)]
    return [*runs, write_run(tmp_path / "a2", records, model="a", model_sha256="a", seed=1)]


def test_all_pairs_are_one_family(tmp_path: Path) -> None:
    runs = [load_run(folder) for folder in write_many(tmp_path)]
    result = compare_all(runs)
    assert (result["family"], [(p["i"], p["j"]) for p in result["pairs"]]) == (
        6,
        [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)],
    )
    assert [p["p_holm"] for p in result["pairs"]] == holm([p["p"] for p in result["pairs"]])
    assert result["pairs"][1]["verdict_name"] == "b_better"
    assert "Holm p" in result["pairs"][1]["verdict"]
    assert result["pairs"][0]["verdict_name"] == "not_shown"
    for pair in result["pairs"]:
        alone = compare(runs[pair["i"]], runs[pair["j"]])
        assert {key: pair[key] for key in ("n", "b", "c", "p", "delta", "ci")} == {
            key: alone[key] for key in ("n", "b", "c", "p", "delta", "ci")
        }


def test_a_p_that_its_family_takes_away(tmp_path: Path) -> None:
    a = [1.0] * 40 + [0.0] * 60
    b = [1.0] * 41 + [0.0] * 8 + [1.0] * 7 + [0.0] * 44  # gains 8, losses 0: p = 0.0078
    b[0] = 0.0  # gains 8, loss 1: p = 0.039
    runs = [load_run(write(tmp_path, name, s)) for name, s in (("a", a), ("b", b), ("c", a), ("d", a))]
    pair = compare_all(runs)["pairs"][0]
    assert pair["p"] == pytest.approx(0.0390625)
    assert (compare(runs[0], runs[1])["verdict_name"], pair["verdict_name"]) == ("b_better", "not_shown")


def test_the_matrix_as_text(tmp_path: Path) -> None:
    text = render_matrix(compare_all([load_run(folder) for folder in write_many(tmp_path)], by_difficulty=True))
    assert "column minus row, in points; * Holm p < 0.05 over 6 pairs" in text
    assert "one model, two seeds: noise" in text
    assert "C is better" in text
    assert "below the noise floor" in text
    assert text.count("\n  a  ") == 6
    # The folders' own names are as long as they are.
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) < 200
    assert names(28)[-3:] == ["Z", "AA", "AB"]


def test_the_command_over_many_runs(tmp_path: Path) -> None:
    folders = write_many(tmp_path)
    shown = cli(*folders, "--by", "difficulty", "--by", "database")
    assert shown.returncode == 0, shown.stderr
    assert "over 6 pairs" in shown.stdout
    figures = json.loads(cli(*folders, "--json", "--by", "database").stdout)
    assert [set(pair["by_database"]) for pair in figures["pairs"]] == [{"db0", "db1", "db2", "db3"}] * 6
    family = [stratum for pair in figures["pairs"] for stratum in pair["by_database"].values()]
    assert [s["p_holm"] for s in family] == pytest.approx(holm([s["p"] for s in family]))
    one = cli(folders[0])
    assert (one.returncode, one.stderr.count("\n")) == (2, 1)
    assert "two runs or more" in one.stderr


def test_one_pair_that_cannot_be_compared_refuses_the_lot(tmp_path: Path) -> None:
    runs = [load_run(write(tmp_path, name, [1.0, 0.0])) for name in "ab"]
    other = load_run(write(tmp_path, "c", [1.0, 0.0], data_sha256="e" * 64))
    with pytest.raises(SetupError, match="saw different data"):
        compare_all([*runs, other])


# ---- the noise floor


def test_two_runs_of_one_model_are_noise(tmp_path: Path) -> None:
    a, _, _, again = (load_run(folder) for folder in write_many(tmp_path))
    result = compare(a, again)
    assert result["same_model"]
    assert result["noise"]["flip_rate"] == result["flip_rate"] > 0
    assert "Both are runs of one model with different seeds" in result["verdict"]
    assert "Noise floor" in render(result)
    # The same seed, or another setting, is no second run of the same thing.
    assert not compare(a, load_run(write(tmp_path, "x", [0.0] * 200)))["same_model"]


def test_a_difference_below_the_noise_is_marked(tmp_path: Path) -> None:
    a = write(tmp_path, "a", [1.0] * 50 + [0.0] * 50)
    b = write(tmp_path, "b", [1.0] * 57 + [0.0] * 43)
    flips = [1.0] * 40 + [0.0] * 10 + [1.0] * 10 + [0.0] * 40
    again = write_run(
        tmp_path / "a2",
        [record(f"q{i}", s, db_id=f"db{i % 4}", difficulty="ab"[i % 2]) for i, s in enumerate(flips)],
        model="a",
        model_sha256="a",
        seed=1,
    )
    plain = json.loads(cli(a, b, "--json").stdout)
    assert plain["noise"] is None
    assert "take it with care" not in plain["verdict"]
    marked = json.loads(cli(a, b, "--noise", again, "--json").stdout)
    assert marked["noise"]["flip_rate"] == 0.2
    assert (marked["verdict_name"], plain["verdict_name"]) == ("b_better", "b_better")
    assert "flips between two runs of one model (20.0%): take it with care" in marked["verdict"]


# ---- samples and votes


def write_samples(tmp_path: Path, name: str, table: Sequence[str]) -> Path:
    """A question a text, a sample a character: 1 is right, 0 wrong, - did not run; equal ones have one result."""
    records = [
        record(f"q{i}", float(c == "1"), sample=k, answer_set_sha256=None if c == "-" else c)
        for i, text in enumerate(table)
        for k, c in enumerate(text)
    ]
    return write_run(tmp_path / name, records, model=name, model_sha256=name)


def test_runs_with_other_numbers_of_samples_are_paired_by_question(tmp_path: Path) -> None:
    a = load_run(write_samples(tmp_path, "a", ["1", "0", "0", "1"]))
    b = load_run(write_samples(tmp_path, "b", ["10", "11", "00", "11"]))
    result = compare(a, b)
    assert (result["n"], result["b"], result["c"], result["delta"]) == (4, 1, 1, pytest.approx(0.125))
    assert result["samples"] == [1, 2]
    assert "1 and 2 samples a question: each question scores their mean" in render(result)
    assert result["noise"] == {"flip_rate": 0.25, "seen_in": f"the samples of {tmp_path / 'b'}"}


def test_votes_are_compared_when_asked_for(tmp_path: Path) -> None:
    a = load_run(write_samples(tmp_path, "a", ["101", "001", "---", "111"]))
    b = load_run(write_samples(tmp_path, "b", ["000", "111", "1--", "010"]))
    result = compare(a, b, voting=True)
    assert (result["score_a"], result["score_b"], result["b"], result["c"]) == (0.5, 0.5, 2, 2)
    assert result["noise"] is None
    assert "as their vote does" in render(result)
    single = load_run(write_samples(tmp_path, "c", ["1", "1", "1", "1"]))
    with pytest.raises(SetupError, match="one sample a question, which is no vote"):
        compare(a, single, voting=True)


def test_a_metric_that_the_rules_do_not_know(tmp_path: Path) -> None:
    runs = [load_run(write(tmp_path, name, [1.0, 0.0])) for name in "ab"]
    with pytest.raises(SetupError, match="no fair score"):
        compare(*runs, metric="fair")


@pytest.mark.parametrize(
    ("b", "c", "n", "name"),
    [
        (0, 0, 50, "identical"),
        (1, 4, 50, "cannot_show"),
        (3, 4, 50, "cannot_show"),
        (8, 9, 50, "not_shown"),
        (0, 6, 50, "b_better"),
        (9, 1, 50, "a_better"),
    ],
)
def test_verdict_names(tmp_path: Path, b: int, c: int, n: int, name: str) -> None:
    scores_a = [1.0] * b + [0.0] * c + [0.0] * (n - b - c)
    scores_b = [0.0] * b + [1.0] * c + [0.0] * (n - b - c)
    result = compare(*(load_run(write(tmp_path, x, s)) for x, s in (("a", scores_a), ("b", scores_b))))
    assert result["verdict_name"] == verdict_name(result) == name
