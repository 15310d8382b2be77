"""Runs that end before they are done: killed, stopped, taken up again, and refused when they would be another run."""

import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eval import identity
from eval.records import EPISODES, RUN, RunFolder
from eval.run import evaluate
from shared.errors import SetupError
from tests.eval.runs import ENDLESS, GOLDS, SUBMIT_1, arguments, parse, write_questions

ROOT = Path(__file__).resolve().parents[2]


def files(out: Path) -> dict[str, bytes]:
    """The files that two runs of the same settings must share."""
    return {name: (out / name).read_bytes() for name in ("episodes.jsonl", "summary.json")}


def start(argv: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "eval.run", *argv]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def await_file(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


# ---- killed


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_goes_on_to_the_same_files(data: Path, tmp_path: Path, seed: int) -> None:
    evaluate(parse(arguments(data, tmp_path / "whole")))
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    (killed / "summary.json").unlink()
    lines = (killed / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    rng = random.Random(seed)
    rng.shuffle(lines)
    content = b"".join(lines)
    (killed / "episodes.jsonl").write_bytes(content[: rng.randrange(len(content))])
    evaluate(parse(arguments(data, killed, "--workers", "1", "--concurrency", "3")))
    assert files(killed) == files(tmp_path / "whole")


@pytest.mark.slow
def test_kill_9_at_20_random_moments(data: Path, tmp_path: Path) -> None:
    write_questions(data / "many.json", GOLDS * 100)
    more = ("--samples", "2", "--workers", "1")
    evaluate(parse(arguments(data, tmp_path / "whole", *more, questions="many.json")))
    argv = arguments(data, tmp_path / "killed", *more, questions="many.json")
    killed, rng, kills, halfway = tmp_path / "killed", random.Random(0), 0, 0
    while kills < 20:
        process = start(argv)
        if rng.random() < 0.2:  # while it starts
            time.sleep(rng.uniform(0.05, 1.0))
        else:  # once it has gone on by some episodes, or has come to its end
            aim = _lines(killed) + rng.randrange(400)
            while process.poll() is None and _lines(killed) < aim:
                time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:  # it was done before
            assert files(killed) == files(tmp_path / "whole")
            shutil.rmtree(killed)
            continue
        kills += 1
        halfway += 0 < _lines(killed) < 1600
    if not (killed / "summary.json").exists():
        evaluate(parse(argv))
    assert halfway >= 5
    assert files(killed) == files(tmp_path / "whole")


def _lines(folder: Path) -> int:
    path = folder / EPISODES
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_before_run_json_was_there(data: Path, tmp_path: Path) -> None:
    for name in ("out", "begun"):
        (tmp_path / name).mkdir()
    (tmp_path / "out" / f".{RUN}.tmp").write_text('{"identity": {"eng')
    (tmp_path / "begun" / EPISODES).write_text("")
    for name in ("out", "begun"):
        assert evaluate(parse(arguments(data, tmp_path / name)))["n"] == 8


def test_killed_while_it_put_its_episodes_in_order(data: Path, tmp_path: Path) -> None:
    evaluate(parse(arguments(data, tmp_path / "out")))
    whole = files(tmp_path / "out")
    (tmp_path / "out" / "summary.json").unlink()
    (tmp_path / "out" / ".episodes.jsonl.tmp").write_bytes(whole["episodes.jsonl"][:700])
    (tmp_path / "out" / ".summary.json.tmp").write_bytes(b"{")
    evaluate(parse(arguments(data, tmp_path / "out")))
    assert files(tmp_path / "out") == whole


def test_a_damaged_line_in_the_middle_is_no_loss_to_pass_over(data: Path, tmp_path: Path) -> None:
    evaluate(parse(arguments(data, tmp_path / "out")))
    (tmp_path / "out" / "summary.json").unlink()
    lines = (tmp_path / "out" / EPISODES).read_bytes().splitlines(keepends=True)
    (tmp_path / "out" / EPISODES).write_bytes(b"".join([lines[0], b'{"question_id": \n', *lines[2:]]))
    with pytest.raises(SetupError, match=r"episodes\.jsonl:2 is damaged"):
        evaluate(parse(arguments(data, tmp_path / "out")))


def test_two_processes_never_write_one_run(data: Path, tmp_path: Path) -> None:
    run = {"engine": "gold"}
    first, second = RunFolder(tmp_path / "out", run), RunFolder(tmp_path / "out", run)
    first.open({})
    with pytest.raises(SetupError, match="is being written by another process"):
        second.open({})
    first.close()
    RunFolder(tmp_path / "out", run).open({})


# ---- stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done_and_waits_for_no_query(data: Path, tmp_path: Path, number: int) -> None:
    golds = [("shop", "SELECT 1", "simple")] * 3
    write_questions(data / "slow.json", golds)
    submit = json.dumps({"tool": "submit_sql", "args": {"sql": ENDLESS}})
    more = ("--engine", "canned", "--turn", submit, "--workers", "1", "--query-seconds", "300")
    process = start(arguments(data, tmp_path / "out", *more, questions="slow.json"))
    await_file(tmp_path / "out" / RUN, process)
    time.sleep(1.0)  # now the first answer is being scored, for five minutes
    process.send_signal(number)
    sent = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent < 20
    assert process.returncode == 130, errors
    assert "0 of 3 episodes are saved" in errors
    assert "run again to go on" in errors
    assert not (tmp_path / "out" / "summary.json").exists()


def test_ctrl_c_among_the_golds_writes_nothing(data: Path, tmp_path: Path) -> None:
    write_questions(data / "endless.json", [("shop", ENDLESS, "simple")])
    argv = arguments(data, tmp_path / "out", "--gold-seconds", "300", questions="endless.json")
    process = start(argv)
    time.sleep(3.0)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent < 20
    assert (process.returncode, errors.strip().splitlines()[-1]) == (130, "interrupted")
    assert not (tmp_path / "out").exists()


# ---- refused


@pytest.fixture(scope="module")
def unfinished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the canned engine without its summary, beside a copy of its data."""
    folder = tmp_path_factory.mktemp("unfinished")
    shutil.copytree(data / "databases", folder / "databases")
    shutil.copy(data / "questions.json", folder / "questions.json")
    evaluate(parse(arguments(folder, folder / "out", "--engine", "canned", "--turn", SUBMIT_1)))
    (folder / "out" / "summary.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("options", "differs"),
    [
        (["--seed", "1"], "seed"),
        (["--mode", "full"], "mode"),
        (["--turn", "and then this"], "model_sha256"),
        (["--temperature", "0.7"], "sampling"),
        (["--max-turns", "5"], "budgets"),
        (["--query-seconds", "29"], "limits"),
        (["--gold-seconds", "29"], "limits"),
        (["--samples", "2"], "samples"),
        (["--no-audit"], "gold_audit"),
        (["--exclude", "gold_tie"], "exclusion_rule"),
        (["--limit", "7"], "data_sha256, questions"),
    ],
)
def test_a_changed_setting_does_not_resume(unfinished: Path, options: list[str], differs: str) -> None:
    argv = arguments(unfinished, unfinished / "out", "--engine", "canned", "--turn", SUBMIT_1, *options)
    with pytest.raises(SetupError, match=f"differs in {differs}: give another one"):
        evaluate(parse(argv))


@pytest.mark.parametrize("what", ["question", "database", "prompt", "code", "sqlite"])
def test_changed_data_or_code_does_not_resume(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shutil.copytree(unfinished, tmp_path / "run")
    folder = tmp_path / "run"
    differs = "versions"
    if what == "question":
        (folder / "questions.json").write_text((folder / "questions.json").read_text().replace("Question 3?", "Which?"))
        differs = "data_sha256"
    elif what == "database":
        connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
        connection.execute("UPDATE item SET price = 9 WHERE id = 3")
        connection.commit()
        connection.close()
        differs = "data_sha256"
    elif what == "prompt":
        monkeypatch.setattr(identity, "PROMPT_SHA256", "0" * 64)
        differs = "prompt_sha256"
    elif what == "code":
        monkeypatch.setattr(identity, "code_sha256", lambda: "0" * 64)
    else:
        monkeypatch.setattr(identity.sqlite3, "sqlite_version", "3.99.0")
    with pytest.raises(SetupError, match=f"differs in {differs}: "):
        evaluate(parse(arguments(folder, folder / "out", "--engine", "canned", "--turn", SUBMIT_1)))


def test_how_it_runs_may_change(unfinished: Path, tmp_path: Path) -> None:
    shutil.copytree(unfinished, tmp_path / "run")
    folder = tmp_path / "run"
    more = ("--workers", "3", "--concurrency", "2", "--no-cache", "--engine", "canned", "--turn", SUBMIT_1)
    assert evaluate(parse(arguments(folder, folder / "out", *more)))["n"] == 8


def test_the_code_that_counts_is_what_episodes_and_verdicts_go_through() -> None:
    names = {str(path.relative_to(ROOT)) for pattern in identity._CODE for path in ROOT.glob(pattern)}
    assert {"shared/episode.py", "shared/sql/worker.py", "eval/scorers/bird.py", "eval/judge.py"} <= names
    assert {"eval/goldbook.py", "eval/sqltext.py", "eval/tablebook.py"} <= names
    assert not {"eval/report.py", "eval/compare.py", "eval/summary.py", "train/loss.py"} & names
