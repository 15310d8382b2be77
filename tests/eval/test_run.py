"""eval.run from questions to summary, with engines that follow a script: exact scores, resuming, golds that fail."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.config import parse_arguments
from eval.records import read_episodes
from eval.run import evaluate, main, question_seed
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from shared.tools.executor import ToolExecutor
from shared.tools.protocol import BadCall, Call, ToolResult
from tests.eval.runs import ENDLESS, GOLDS, SUBMIT_1, arguments, write_questions

ROOT = Path(__file__).resolve().parents[2]


def run(data: Path, out: Path, *more: str, questions: str = "questions.json") -> dict[str, Any]:
    return evaluate(parse_arguments(arguments(data, out, *more, questions=questions)))


def files(out: Path) -> dict[str, bytes]:
    """The files that two runs of the same settings must share."""
    return {name: (out / name).read_bytes() for name in ("episodes.jsonl", "summary.json")}


@pytest.mark.parametrize("mode", ["full", "withheld"])
def test_the_gold_oracle_scores_1(data: Path, tmp_path: Path, mode: str) -> None:
    summary = run(data, tmp_path / "out", "--mode", mode)
    assert (summary["n"], summary["official"], summary["strict"], summary["submit_rate"]) == (8, 1.0, 1.0, 1.0)
    assert summary["excluded"] == []
    assert summary["gold"]["shape"] == {"empty": 1, "rows": 7}
    assert summary["gold"]["undecodable"] == 1
    assert summary["by_difficulty"]["challenging"]["n"] == 2
    assert (summary["mean_turns"], summary["identity"]["mode"]) == (pytest.approx(23 / 8), mode)
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


def independent_verdicts(data: Path, golds: Sequence[tuple[str, str, str]], sql: str) -> list[bool]:
    verdicts = []
    for db, gold, _ in golds:
        connection = sqlite3.connect(data / "databases" / db / f"{db}.sqlite")
        connection.text_factory = bytes
        verdicts.append(set(connection.execute(gold)) == set(connection.execute(sql)))
        connection.close()
    return verdicts


def test_a_canned_answer_scores_what_set_equality_says(data: Path, tmp_path: Path) -> None:
    summary = run(data, tmp_path / "out", "--engine", "canned", "--turn", SUBMIT_1)
    expected = independent_verdicts(data, GOLDS, "SELECT 1")
    assert sum(expected) == 3
    episodes = read_episodes(tmp_path / "out" / "episodes.jsonl")
    assert [episode["scores"]["official"]["score"] for episode in episodes] == [float(v) for v in expected]
    assert (summary["official"], summary["strict"]) == (3 / 8, 2 / 8)
    assert {episode["answer_sql"] for episode in episodes} == {"SELECT 1"}


def test_episodes_hold_what_it_takes_to_score_them_again(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "out")
    first = read_episodes(tmp_path / "out" / "episodes.jsonl")[0]
    assert first["answer_sql"] == first["gold_sql"] == GOLDS[0][1]
    assert (first["origin"], first["db_id"], len(first["database_sha256"])) == ("submitted", "shop", 64)
    assert [call["tool"] for turn in first["turns"] for call in turn["calls"]] == [
        "list_tables",
        "describe_table",
        "submit_sql",
    ]
    assert first["scores"]["official"] == {"rule": "bird_official", "score": 1.0, "reason": "same set of rows"}
    assert first["scores"]["strict"]["rule"] == "bird_strict"


def test_results_do_not_depend_on_workers_or_concurrency(data: Path, tmp_path: Path) -> None:
    run(data, tmp_path / "one", "--workers", "1", "--concurrency", "1")
    run(data, tmp_path / "many", "--workers", "3", "--concurrency", "5")
    assert files(tmp_path / "one") == files(tmp_path / "many")


def test_a_gold_that_fails_is_nobodys_fault(data: Path, tmp_path: Path) -> None:
    golds = [
        ("shop", ENDLESS, "simple"),
        ("shop", "SELECT FROM WHERE", "simple"),
        ("shop", "SELECT name FROM item ORDER BY price LIMIT 1", "simple"),
        ("shop", "DELETE FROM item", "simple"),
        ("shop", "SELECT 1", "simple"),
    ]
    write_questions(data / "bad.json", golds)
    more = ("--gold-seconds", "1", "--engine", "canned", "--turn", SUBMIT_1)
    summary = run(data, tmp_path / "out", *more, questions="bad.json")
    assert (summary["n"], summary["n_questions"], summary["official"]) == (2, 5, 0.5)
    assert {item["question_id"]: item["status"] for item in summary["excluded"]} == {
        "q0": "gold_timeout",
        "q1": "gold_error",
        "q3": "gold_error",
    }
    assert all(item["reason"] for item in summary["excluded"])
    assert summary["gold"]["status"] == {"gold_error": 2, "gold_timeout": 1, "ok": 2}


def test_a_fault_of_ours_is_nobodys_fault_either(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ToolExecutor.call

    def broken(self: ToolExecutor, asked: Call | BadCall) -> ToolResult:
        if asked.tool == "describe_table" and isinstance(asked, Call) and asked.args["table_name"] == "city":
            raise RuntimeError("a bug in a tool")
        return call(self, asked)

    monkeypatch.setattr(ToolExecutor, "call", broken)
    assert main(arguments(data, tmp_path / "out")) == 1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["n"], summary["n_questions"], summary["official"]) == (6, 8, 1.0)
    assert [(i["question_id"], i["status"], i["reason"]) for i in summary["excluded"]] == [
        ("q5", "harness_error", "RuntimeError: a bug in a tool"),
        ("q7", "harness_error", "RuntimeError: a bug in a tool"),
    ]
    assert "2 of 8 episodes have no verdict" in capsys.readouterr().out


def test_a_gold_too_large_to_keep_runs_again(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(data, tmp_path / "kept")
    monkeypatch.setattr("eval.goldbook._KEPT_CELLS", 0)
    run(data, tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "kept")


def test_each_gold_is_examined_once(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_questions(data / "repeated.json", GOLDS * 3)
    queries: list[str] = []
    query_many = Sandbox.query_many

    def counted(self: Sandbox, database: Database, statements: Sequence[str], *rest: Any, **more: Any) -> Any:
        queries.extend(statements)
        return query_many(self, database, statements, *rest, **more)

    monkeypatch.setattr(Sandbox, "query_many", counted)
    said = ("--engine", "canned", "--turn", SUBMIT_1, "--gold-cache", str(tmp_path / "cache"))
    for name, options, times in (("once", ["--no-audit", "--no-cache"], 1), ("audit", [], 3), ("again", [], 0)):
        queries.clear()
        run(data, tmp_path / name, *said, *options, questions="repeated.json")
        assert [queries.count(sql) for _, sql, _ in GOLDS] == [times] * len(GOLDS), name


def test_no_submission_scores_0_even_when_gold_is_empty(data: Path, tmp_path: Path) -> None:
    write_questions(data / "empty.json", [GOLDS[3]])
    summary = run(data, tmp_path / "out", "--engine", "canned", "--turn", "I give up.", questions="empty.json")
    assert (summary["n"], summary["official"], summary["submit_rate"], summary["outcomes"]) == (
        1,
        0.0,
        0.0,
        {"no_answer": 1},
    )


def test_seeds_belong_to_questions() -> None:
    assert question_seed(0, "q1") == question_seed(0, "q1")
    assert len({question_seed(s, q, k) for s in (0, 1) for q in ("q1", "q2") for k in (0, 1)}) == 8


def test_limit_and_databases_select_questions(data: Path, tmp_path: Path) -> None:
    assert run(data, tmp_path / "a", "--limit", "2")["n"] == 2
    city = run(data, tmp_path / "b", "--db", "city")
    assert list(city["by_database"]) == ["city"]
    assert json.loads((tmp_path / "a" / "run.json").read_text())["left_out"] == {"beyond --limit": 6}


def test_a_config_file_and_the_command_line(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "eval.yaml"
    config.write_text(f"engine: gold\nmode: full\nlimit: 3\nout: {tmp_path / 'out'}\n")
    where = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases")]
    summary = evaluate(parse_arguments(["--config", str(config), *where, "--limit", "2"]))
    assert (summary["n"], summary["identity"]["mode"]) == (2, "full")


def test_without_an_output_folder_the_run_is_named_after_what_it_is() -> None:
    config = parse_arguments(["--engine", "gold", "--benchmark", "bird", "--mode", "full"])
    assert config.folder() == Path("runs/eval-bird-full-gold")
    config = parse_arguments(["--model", "exports/curriculum/", "--benchmark", "spider"])
    assert config.folder() == Path("runs/eval-spider-withheld-curriculum")


def test_bad_input_is_one_line_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (plain / name).write_text("{}")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    (tmp_path / "turns.json").write_text('{"not": "a list"}')
    (tmp_path / "none.json").write_text("[]")
    write_questions(tmp_path / "gone.json", [("gone", "SELECT 1", "simple")])
    run(data, tmp_path / "finished")
    before = sorted(tmp_path.rglob("*"))
    out = str(tmp_path / "out")
    own = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases")]
    gold = ["--engine", "gold"]
    cases: list[tuple[list[str], str]] = [
        ([*gold, "--benchmark", "nope", "--out", out], "unknown benchmark nope: one of bird"),
        ([*gold, "--benchmark", "bird", "--data", str(tmp_path), "--out", out], "benchmark bird is not under"),
        ([*gold, "--out", out], "nothing to evaluate on"),
        ([*gold, *own[:2], "--out", out], "belong together"),
        ([*gold, "--questions", str(tmp_path / "missing.json"), *own[2:], "--out", out], "missing.json cannot be read"),
        ([*gold, "--questions", str(tmp_path / "none.json"), *own[2:], "--out", out], "holds no questions"),
        ([*gold, "--questions", str(tmp_path / "gone.json"), *own[2:], "--out", out], "database gone"),
        ([*gold, *own, "--db", "nowhere", "--out", out], "no question"),
        ([*gold, *own, "--out", str(tmp_path / "used")], "is in use and holds no run"),
        ([*gold, *own, "--out", str(tmp_path / "finished")], "in use by a finished run"),
        ([*gold, *own, "--out", str(tmp_path / "turns.json")], "is a file"),
        ([*gold, *own, "--out", str(tmp_path / "turns.json" / "run")], "turns.json is a file, not a folder"),
        ([*gold, *own, "--out", out, "--model", str(model)], "takes no --model"),
        ([*gold, *own, "--out", out, "--turn", "x"], "belong to --engine canned"),
        ([*own, "--out", out, "--engine", "canned"], "says nothing"),
        ([*own, "--out", out, "--engine", "canned", "--turns", str(tmp_path / "turns.json")], "not a JSON list"),
        ([*own, "--out", out], "no model: give --model"),
        ([*own, "--out", out, "--model", str(tmp_path / "no-model")], "does not exist"),
        ([*own, "--out", out, "--model", "nobody/nothing"], "neither a folder here nor in the local cache"),
        ([*own, "--out", out, "--model", str(tmp_path / "used")], "has no config.json"),
        ([*own, "--out", out, "--model", str(model)], "has no tokenizer"),
        ([*own, "--out", out, "--model", str(plain)], "has no chat template"),
        ([*gold, *own, "--out", out, "--temperature", "-1"], "temperature"),
        ([*gold, *own, "--out", out, "--limit", "many"], "argument --limit: invalid int value: 'many'"),
        ([*gold, *own, "--out", out, "--mode", "half"], "argument --mode: invalid choice: 'half'"),
        ([*gold, *own, "--outt", out], "unrecognized arguments: --outt"),
        ([*gold, *own, "--out", out, "--config", str(tmp_path / "no.yaml")], "does not exist"),
    ]
    for argv, message in cases:
        with pytest.raises(SetupError) as error:
            main(argv)
        assert message in str(error.value), argv
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_ends_with_2_and_one_line(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eval.run", *arguments(data, tmp_path / "out", "--db", "nowhere")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_the_command_prints_the_scores(data: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eval.run", *arguments(data, tmp_path / "out")]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "100"}
    )
    assert result.returncode == 0, result.stderr
    assert "official 1.000" in result.stderr
    assert "challenging" in result.stdout
    assert f"written to {tmp_path / 'out'}" in result.stdout


@pytest.mark.parametrize("mode", ["full", "withheld"])
@pytest.mark.parametrize(
    ("benchmark", "db", "n"), [("spider", None, 574), ("kaggledbqa", None, 60), ("bird", "superhero", 129)]
)
def test_the_gold_oracle_on_real_benchmarks(
    test_data: Path, tmp_path: Path, mode: str, benchmark: str, db: str | None, n: int
) -> None:
    more = ["--db", db] if db else []
    where = ["--engine", "gold", "--benchmark", benchmark, "--data", str(test_data / "data"), "--mode", mode]
    summary = evaluate(parse_arguments([*where, *more, "--out", str(tmp_path / "out")]))
    assert (summary["n"], summary["official"], summary["excluded"]) == (n, 1.0, [])


def test_always_select_1_on_a_real_benchmark(test_data: Path, tmp_path: Path) -> None:
    folder = test_data / "data" / "spider_dev"
    where = ["--benchmark", "spider", "--data", str(test_data / "data"), "--out", str(tmp_path / "out")]
    evaluate(parse_arguments([*where, "--engine", "canned", "--turn", SUBMIT_1]))
    episodes = read_episodes(tmp_path / "out" / "episodes.jsonl")
    expected = []
    for question in json.loads((folder / "dev.json").read_text()):
        path = next((folder / "database" / question["db_id"]).glob("*.sqlite"))
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        expected.append(float(set(connection.execute(question["query"])) == {(1,)}))
        connection.close()
    assert [episode["scores"]["official"]["score"] for episode in episodes] == expected
