"""Several samples a question: seeds, means, flips, votes, and a run of them from end to end."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import run as run_module
from eval.engines import Prepared
from eval.records import read_episodes
from eval.run import evaluate
from eval.summary import summarize
from eval.voting import flip_rate, summarize_samples, vote, votes
from shared.chat import ByteCodec
from shared.engines.base import Request
from shared.engines.scripted import ScriptedEngine, call_text
from shared.errors import SetupError
from tests.eval.runs import IDENTITY, arguments, parse, record


def samples(question: str, answers: Sequence[tuple[str | None, float]]) -> list[dict[str, Any]]:
    """One record a sample: what identifies its result (None: it did not run), and its score."""
    return [record(question, score, sample=k, answer_set_sha256=name) for k, (name, score) in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "winner", "sizes", "tied"),
    [
        ([("x", 0.0), ("y", 1.0), ("y", 1.0)], 1, (2, 1), False),
        ([("x", 0.0), ("y", 1.0)], 0, (1, 1), True),
        ([("y", 1.0), ("x", 0.0), ("x", 0.0), ("y", 1.0)], 0, (2, 2), True),
        ([(None, 0.0), (None, 0.0), ("y", 1.0)], 2, (1,), False),
        ([(None, 0.0), (None, 0.0)], None, (), False),
    ],
)
def test_the_largest_class_wins_and_of_equals_the_lowest_sample(
    answers: list[tuple[str | None, float]], winner: int | None, sizes: tuple[int, ...], tied: bool
) -> None:
    found = vote("q", samples("q", answers))
    assert (None if found.winner is None else found.winner["sample"], found.sizes, found.tied) == (winner, sizes, tied)
    assert found.score("official") == (0.0 if winner is None else answers[winner][1])


@given(st.lists(st.sampled_from(["x", "y", "z", None]), min_size=1, max_size=7), st.randoms())
def test_votes_do_not_depend_on_the_order_of_records(answers: list[str | None], rng: random.Random) -> None:
    records = samples("q", [(answer, 0.0) for answer in answers])
    shuffled = rng.sample(records, len(records))
    assert votes(records) == votes(shuffled)


def test_figures_of_samples() -> None:
    records = [
        *samples("a", [("x", 1.0), ("x", 1.0), ("y", 0.0)]),
        *samples("b", [("x", 0.0), ("y", 1.0), (None, 0.0)]),
        *samples("c", [(None, 0.0), (None, 0.0), (None, 0.0)]),
        record("d", None),
    ]
    figures = summarize_samples(records)
    assert (figures["k"], figures["questions"]) == (3, 3)
    assert figures["official"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)
    assert figures["per_sample"] == pytest.approx([1 / 3, 2 / 3, 0.0])
    assert figures["any_right"] == pytest.approx(2 / 3)
    assert figures["flip_rate"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)
    assert figures["ci"][0] < figures["official"] < figures["ci"][1]
    voted = figures["vote"]
    assert (voted["n"], voted["official"], voted["ties"], voted["without_vote"]) == (3, pytest.approx(1 / 3), 1, 1)
    assert "of equals" in voted["rule"]


def test_a_sample_lost_to_the_harness_does_not_vote_and_does_not_weigh() -> None:
    lost = record("a", None, sample=2) | {"status": "harness_error"}
    records = [*samples("a", [("x", 1.0), ("y", 0.0)]), lost, *samples("b", [("x", 0.0)] * 3)]
    summary = summarize(records, IDENTITY)
    assert (summary["n"], summary["n_questions"], summary["n_episodes"]) == (5, 2, 6)
    assert summary["official"] == pytest.approx((0.5 + 0.0) / 2)  # not 1/5: a question counts once
    assert summary["samples"]["vote"]["official"] == 0.5


def test_one_sample_has_neither_votes_nor_flips() -> None:
    figures = summarize_samples([record("a", 1.0), record("b", 0.0)])
    assert (figures["k"], figures["official"]) == (1, 0.5)
    assert not {"vote", "flip_rate"} & figures.keys()
    assert flip_rate([record("a", 1.0)]) is None
    assert summarize_samples([record("a", None)]) == {"k": 1, "questions": 0}


# ---- through eval.run


def seeded(request: Request) -> str:
    """Right in about two of three episodes, as the episode's seed has it."""
    gold = request.context["example"].gold_sql
    dice = random.Random(request.params.seed).random()
    return call_text("Submit.", "submit_sql", sql=gold if dice < 0.66 else f"SELECT {int(dice * 1000)}, 'wrong'")


@pytest.fixture
def dice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is one that throws dice."""
    codec = ByteCodec()
    prepared = Prepared(codec, "dice", lambda: ScriptedEngine(codec, seeded, "dice"))
    monkeypatch.setattr(run_module, "prepare_engine", lambda config: prepared)


@pytest.mark.usefixtures("dice")
def test_each_sample_has_its_own_seed_and_the_files_do_not_depend_on_how_it_ran(data: Path, tmp_path: Path) -> None:
    summary = evaluate(parse(arguments(data, tmp_path / "a", "--vote", "5", "--workers", "1", "--concurrency", "1")))
    evaluate(parse(arguments(data, tmp_path / "b", "--samples", "5", "--workers", "3", "--concurrency", "7")))
    episodes = read_episodes(tmp_path / "a" / "episodes.jsonl")
    assert (tmp_path / "a" / "episodes.jsonl").read_bytes() == (tmp_path / "b" / "episodes.jsonl").read_bytes()
    assert [(e["question_id"], e["sample"]) for e in episodes] == [(f"q{i}", k) for i in range(8) for k in range(5)]
    assert len({e["seed"] for e in episodes}) == 40
    assert (summary["n"], summary["n_questions"], summary["samples"]["k"]) == (40, 8, 5)
    assert summary["identity"]["samples"] == 5
    assert summary["samples"]["vote"]["official"] >= summary["official"] > 0
    assert 0 < summary["samples"]["flip_rate"] < 1
    timing = [json.loads(line) for line in (tmp_path / "a" / "timing.jsonl").read_text().splitlines()]
    assert {(t["question_id"], t["sample"]) for t in timing} == {(e["question_id"], e["sample"]) for e in episodes}


@pytest.mark.usefixtures("dice")
def test_a_run_of_samples_resumes_between_them(data: Path, tmp_path: Path) -> None:
    argv = arguments(data, tmp_path / "out", "--samples", "3")
    evaluate(parse(argv))
    whole = {name: (tmp_path / "out" / name).read_bytes() for name in ("episodes.jsonl", "summary.json")}
    (tmp_path / "out" / "summary.json").unlink()
    lines = whole["episodes.jsonl"].splitlines(keepends=True)
    (tmp_path / "out" / "episodes.jsonl").write_bytes(b"".join(lines[::2]) + lines[1][:50])
    with pytest.raises(SetupError, match="differs in samples"):
        evaluate(parse([*argv, "--samples", "4"]))
    evaluate(parse(argv))
    assert {name: (tmp_path / "out" / name).read_bytes() for name in whole} == whole


@pytest.mark.usefixtures("dice")
def test_the_votes_are_printed(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_module.main(arguments(data, tmp_path / "out", "--vote", "4")) == 0
    out = capsys.readouterr().out
    for text in ("vote of 4", "mean of 4 samples a question", "flip rate", "some sample right"):
        assert text in out


def test_vote_and_samples_must_agree() -> None:
    assert parse(["--vote", "5", "--samples", "5"]).sample_count() == 5
    with pytest.raises(SetupError, match="--vote 5 takes 5 samples"):
        parse(["--vote", "5", "--samples", "4"])
    with pytest.raises(SetupError, match="vote"):
        parse(["--vote", "1"])
