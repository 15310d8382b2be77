"""Spider 2.0 through eval.run and eval.audit: gold tables judge, gold queries only answer."""

import json
from pathlib import Path

import pytest

from eval.audit import audit
from eval.audit import parse_arguments as parse_audit
from eval.records import read_episodes
from eval.run import evaluate
from shared.errors import SetupError
from tests.eval.runs import parse
from tests.spider2_copy import databases_of, write_copy

IDS = {"local002": "E_commerce", "local009": "Airlines", "local275": "oracle_sql", "local329": "log"}
SIX = json.dumps({"tool": "submit_sql", "args": {"sql": "SELECT 'x', sum(n) FROM item"}})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with four questions: two with a gold query, one of which does not pass its tables."""
    write_copy(
        tmp_path / "data" / "spider2-lite",
        ids=IDS,
        golds={"local275": {"_a": "product\n", "_b": "product\nsix\n"}, "local009": {"": "a,b\n7,6\n"}},
        condition_cols={"local009": [1]},
        sql={"local002": "SELECT sum(n) FROM item", "local329": "SELECT 7"},
    )
    return tmp_path / "data"


def options(data: Path, out: Path, *more: str) -> list[str]:
    return ["--benchmark", "spider2", "--data", str(data), "--present-only", "--out", str(out), *more]


def test_answers_are_held_against_the_tables(data: Path, tmp_path: Path) -> None:
    argv = options(data, tmp_path / "out", "--engine", "canned", "--turn", SIX)
    summary = evaluate(parse(argv))
    episodes = {e["question_id"]: e for e in read_episodes(tmp_path / "out" / "episodes.jsonl")}
    verdicts = {q: (e["scores"]["official"]["score"], e["scores"]["official"]["rule"]) for q, e in episodes.items()}
    assert verdicts == {
        "local002": (1.0, "spider2"),
        "local009": (1.0, "spider2"),
        "local275": (0.0, "spider2"),
        "local329": (1.0, "spider2"),
    }
    assert episodes["local002"]["scores"]["strict"] is None
    assert (summary["n"], summary["official"], summary["strict"]) == (4, 0.75, None)
    assert summary["rules"] == {"official": "spider2", "strict": None, "fair": None, "soft_f1": None}
    assert summary["gold"]["flagged"] == {"gold_mismatch": ["local329"], "gold_empty": ["local275"]}
    assert json.loads((tmp_path / "out" / "run.json").read_text())["left_out"] == {
        "not local": 1,
        "not in the question file": 131,
    }


def test_an_empty_answer_passes_where_an_alternative_is_empty(data: Path, tmp_path: Path) -> None:
    nothing = json.dumps({"tool": "submit_sql", "args": {"sql": "SELECT n FROM item WHERE 0"}})
    argv = options(data, tmp_path / "out", "--engine", "canned", "--turn", nothing)
    summary = evaluate(parse(argv))
    assert (summary["official"], summary["gold"]["official_without"]["gold_empty"]) == (0.25, 0.0)


def test_the_gold_engine_answers_where_there_is_a_gold_query(data: Path, tmp_path: Path) -> None:
    summary = evaluate(parse(options(data, tmp_path / "out", "--engine", "gold")))
    assert (summary["n"], summary["official"]) == (2, 0.5)
    assert summary["gold"]["official_without"] == {"gold_mismatch": 1.0}
    left_out = json.loads((tmp_path / "out" / "run.json").read_text())["left_out"]
    assert left_out["without a gold query, which --engine gold would answer with"] == 2


def test_the_audit_runs_gold_queries_and_judges_nobody_by_them(data: Path) -> None:
    figures = audit(parse_audit(["--benchmark", "spider2", "--data", str(data), "--present-only"]))
    entries = {entry["question_id"]: entry for entry in figures["golds"]}
    assert {q: e["status"] for q, e in entries.items()} == {
        "local002": "ok",
        "local009": "ok",
        "local275": "gold_empty",
        "local329": "gold_mismatch",
    }
    assert entries["local329"]["message"] == "gold query: matches no gold table"
    assert (figures["usable"], figures["ceiling"]["official"], figures["gold_queries"]) == (4, 1.0, 2)


def test_the_subset_is_part_of_what_a_run_is(data: Path, tmp_path: Path) -> None:
    canned = ("--engine", "canned", "--turn", SIX)
    summary = evaluate(parse(options(data, tmp_path / "out", *canned, "--subset", "guess87")))
    assert (summary["n"], summary["identity"]["subset"]) == (2, "guess87")
    with pytest.raises(SetupError, match="unknown subset half of spider2: one of all, guess87"):
        evaluate(parse(options(data, tmp_path / "no", *canned, "--subset", "half")))
    with pytest.raises(SetupError, match="--subset belongs to spider2"):
        evaluate(parse(["--benchmark", "bird", "--subset", "guess87", *canned, "--questions", "q", "--databases", "d"]))


def test_a_changed_gold_table_is_other_data(data: Path, tmp_path: Path) -> None:
    argv = options(data, tmp_path / "out", "--engine", "canned", "--turn", SIX)
    first = evaluate(parse(argv))
    (tmp_path / "out" / "summary.json").unlink()
    gold = data / "spider2-lite" / "evaluation_suite" / "gold" / "exec_result" / "local002_a.csv"
    gold.write_text("total\n8\n")
    with pytest.raises(SetupError, match="differs in data_sha256"):
        evaluate(parse(argv))
    argv[argv.index("--out") + 1] = str(tmp_path / "new")
    assert (first["official"], evaluate(parse(argv))["official"]) == (0.75, 0.5)


def test_a_table_that_cannot_be_read_stops_the_run(data: Path, tmp_path: Path) -> None:
    gold = data / "spider2-lite" / "evaluation_suite" / "gold" / "exec_result" / "local002_a.csv"
    gold.write_text("")
    with pytest.raises(SetupError, match="a gold table cannot be read"):
        evaluate(parse(options(data, tmp_path / "out", "--engine", "canned", "--turn", SIX)))


def test_a_copy_in_another_place(data: Path, tmp_path: Path) -> None:
    questions = data / "spider2-lite" / "spider2-lite.jsonl"
    where = ["--benchmark", "spider2", "--questions", str(questions), "--databases", str(databases_of(questions))]
    summary = evaluate(parse([*where, "--present-only", "--engine", "gold", "--out", str(tmp_path / "out")]))
    assert summary["n"] == 2


def test_the_real_gold_tables_pass_and_the_real_questions_run(test_data: Path, tmp_path: Path) -> None:
    folder = test_data / "data" / "spider2_lite"
    where = ["--benchmark", "spider2", "--questions", str(folder / "spider2-lite.local.jsonl")]
    where += ["--databases", str(folder / "sample_dbs"), "--present-only"]
    figures = audit(parse_audit(where))
    assert figures["usable"] == figures["questions"] == 82
    # The databases there hold sample rows only, so hardly any gold query gives the tables; nobody is charged for it.
    assert set(figures["flagged"]) <= {"gold_mismatch", "gold_empty"}
    summary = evaluate(parse([*where, "--engine", "canned", "--turn", SIX, "--out", str(tmp_path / "out")]))
    assert (summary["n"], summary["excluded"]) == (82, [])
