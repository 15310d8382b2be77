"""The scorers on case files, and what the case files cannot say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eval import check_cases
from eval.check_cases import Parity, check, load_cases
from eval.scorers import bird, spider2, sqale
from eval.scorers.base import Scores
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import BadText, Limits, QueryResult, Sandbox

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).parent / "cases.jsonl"


@pytest.mark.parametrize("parity", ["isolated", "upstream"])
def test_golden_cases_agree(parity: Parity) -> None:
    assert [miss for miss in check(load_cases(CASES), parity) if miss is not None] == []


@pytest.mark.parametrize("parity", ["isolated", "upstream"])
def test_cases_checked_against_the_upstream_programs_agree(test_data: Path, parity: Parity) -> None:
    for path in sorted((test_data / "scoring").glob("cases_*.jsonl")):
        cases = load_cases(path)
        assert [miss for miss in check(cases, parity) if miss is not None] == []


def test_the_command_reports_misses_and_fails(tmp_path: Path) -> None:
    lines = CASES.read_text().splitlines()[:4]
    wrong = json.loads(lines[0]) | {"id": "wrong", "expected": 0, "meta": {}}
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join([*lines, json.dumps(wrong)]))
    result = subprocess.run(
        [sys.executable, "-m", "eval.check_cases", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert "MISS wrong bird_official: expected 0, got 1" in result.stdout
    assert "4/5 agreed (isolated)" in result.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "cases.jsonl:1 is not a scoring case"),
        ('{"id": "x"}', "cases.jsonl:1 is not a scoring case"),
        ('{"id": "x", "comparator": "rouge", "input": {}, "expected": 1}', "unknown comparator 'rouge'"),
    ],
)
def test_files_that_hold_no_cases_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(SetupError, match=message):
        load_cases(path)
    with pytest.raises(SetupError, match="does not exist"):
        load_cases(tmp_path / "none.jsonl")


def test_the_wanted_score_follows_the_pandas_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = {"by_pandas": {"2.0.3": 0, "2.2.3": 0, "3.1.1": 1}}
    case = check_cases.Case("x", "spider2", {}, 0.0, "", meta)
    for installed, wanted in (("2.3.3", 0.0), ("3.0.0", 1.0), ("4.0.0", 0.0)):
        monkeypatch.setattr(check_cases, "version", lambda name, installed=installed: installed)
        assert case.wanted("isolated") == wanted


def ok(*rows: tuple[object, ...]) -> QueryResult:
    return QueryResult("ok", ("c",), list(rows))


def test_every_verdict_names_its_rule() -> None:
    scores = bird.score_results(ok((1,), (1,)), ok((1,)))
    assert [(v.rule, v.score) for v in (scores.official, scores.strict, scores.soft_f1) if v] == [
        ("bird_official", 1.0),
        ("bird_strict", 0.0),
        ("bird_soft_f1", 1.0),
    ]
    assert sqale.score_results(ok((1,)), ok((1,))).official.rule == "sqale_official"
    assert Scores.from_json(json.loads(json.dumps(scores.to_json()))) == scores


def test_no_answer_scores_0_even_against_an_empty_gold() -> None:
    scores = bird.score_results(None, ok())
    assert (scores.official.score, scores.official.reason, scores.pred_outcome) == (0.0, "no answer", "no_answer")


@pytest.mark.parametrize("outcome", ["refused", "sql_error", "timeout", "limit"])
def test_an_answer_that_does_not_run_scores_0_even_against_an_empty_gold(outcome: str) -> None:
    scores = bird.score_results(QueryResult(outcome, message="why"), ok())  # type: ignore[arg-type]
    assert (scores.official.score, scores.pred_outcome) == (0.0, outcome)
    assert scores.official.reason == f"answer: {outcome}: why"


def test_undecodable_text_is_compared_by_bytes_unless_the_upstream_rule_is_asked_for() -> None:
    raw = bytes.fromhex("4dfc6e6368656e")
    gold = ok((BadText(raw),))
    assert bird.score_results(ok((BadText(raw),)), gold).official.score == 1.0
    assert bird.score_results(ok(("Mnchen",)), gold).official.score == 0.0
    upstream = bird.score_results(ok((BadText(raw),)), gold, undecodable="fail")
    assert (upstream.official.score, upstream.official.reason) == (0.0, "gold: undecodable text")


@pytest.mark.parametrize("sql", ["", " \n\t", ";", "-- x", "/* a */ -- b\n;", "/* open", "/*/", "\ufeff"])
def test_text_without_a_statement_is_an_empty_result(tmp_path: Path, sql: str) -> None:
    with Sandbox() as sandbox:  # no worker starts: nothing is executed
        result = bird.execute(sandbox, Database("none", path=tmp_path / "none"), sql, Limits())
    assert (result.outcome, result.rows) == ("ok", [])


def test_a_long_run_of_comments_is_read_in_linear_time(tmp_path: Path) -> None:
    assert bird._NO_STATEMENT.match("/* */ -- a\n" * 20_000 + "x") is None
    assert bird._NO_STATEMENT.match("/* */ -- a\n" * 20_000) is not None


def test_a_missing_database_is_a_setup_error_not_a_score(tmp_path: Path) -> None:
    with Sandbox() as sandbox, pytest.raises(SetupError, match="gone"):
        bird.execute(sandbox, Database("gone", path=tmp_path / "gone.sqlite"), "SELECT 1", Limits())
    assert list(tmp_path.iterdir()) == []


def test_csv_chunks_are_typed_one_by_one() -> None:
    rows: list[tuple[object, ...]] = [(n,) for n in range(500)] + [(None,), (501,)]
    lines = spider2.result_to_csv(QueryResult("ok", ("n",), rows)).splitlines()
    assert lines[0] == "n"
    assert (lines[500], lines[501], lines[502]) == ("499", '""', "501.0")


def test_spider2_refuses_results_that_upstream_could_not_write() -> None:
    gold = spider2.GoldTables({"a": "n\n"})
    assert spider2.score_result(None, gold).official.reason == "no answer"
    assert spider2.score_result(QueryResult("ok"), gold).official.reason == "answer: returns no columns"
    bad = QueryResult("ok", ("n",), [(BadText(b"\xff"),)])
    assert spider2.score_result(bad, gold).official.reason == "answer: undecodable text"
    assert spider2.score_result(QueryResult("ok", ("n",)), gold).official.score == 1.0


def test_a_missing_pandas_is_no_unreadable_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(spider2, "import_module", missing)
    with pytest.raises(SetupError, match=r"pip install 'execplan\[eval\]'"):
        spider2.score_csv("a\n1\n", spider2.GoldTables({"": "a\n1\n"}))


def test_every_published_local_gold_passes_its_own_comparator(test_data: Path) -> None:
    folder = test_data / "data" / "spider2_lite" / "gold"
    entries = [json.loads(line) for line in (folder / "spider2lite_eval.local.jsonl").read_text().splitlines()]
    failed = []
    for entry in entries:
        gold = spider2.load_gold(
            folder / "exec_result", entry["instance_id"], entry["condition_cols"], entry["ignore_order"]
        )
        first = gold.csvs[min(gold.csvs)]
        if spider2.score_csv(first, gold).score != 1.0:
            failed.append(entry["instance_id"])
    assert entries
    assert failed == []


def test_a_question_without_gold_files_is_a_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no gold result local001\.csv"):
        spider2.load_gold(tmp_path, "local001", [], True)


def test_scorers_statistics_and_comparison_are_light() -> None:
    code = (
        "import sys, time; start = time.perf_counter()\n"
        "import eval.stats, eval.compare, eval.scorers.bird, eval.scorers.sqale, eval.scorers.spider2\n"
        "print(time.perf_counter() - start)\n"
        "heavy = {'torch', 'transformers', 'pandas', 'scipy.stats'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} loaded' if heavy else 0)"
    )
    seconds = []
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        seconds.append(float(result.stdout))
    assert min(seconds) < 1.0
