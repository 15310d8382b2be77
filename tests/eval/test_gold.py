"""The gold audit: what is said of a gold, what follows from it, what is kept of it, and the command."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.audit import AUDIT, audit, main
from eval.audit import parse_arguments as parse_audit
from eval.gold import RULES, Gold
from eval.goldbook import GoldBook, examine
from eval.goldcache import GoldCache
from eval.run import evaluate
from eval.scorers import bird
from eval.sqltext import asks_the_clock, orders_result, tie_variants
from shared.data.example import Example
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import BadText, Limits, Sandbox
from tests.eval.runs import SUBMIT_1, arguments, parse, write_questions

ROOT = Path(__file__).resolve().parents[2]
CASES = [json.loads(line) for line in (Path(__file__).parent / "gold_cases.jsonl").read_text().splitlines()]
# Three seconds of work at a limit of one: no such gold ends in time, on any machine.
SLOW = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 300000000) SELECT max(n) FROM r"
FIVE = {
    "slow": SLOW,
    "broken": "SELECT name FROM item WHERE",
    "tie": "SELECT name FROM item ORDER BY price LIMIT 1",
    "clock": "SELECT count(*) FROM item WHERE date('now') > '2020-01-01'",
    "good": "SELECT name FROM item WHERE id = 1",
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The five golds over a shop in which two prices tie."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "databases" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
    connection.executescript(
        "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL, weight REAL);"
        "INSERT INTO item VALUES (1, 'ant', 1.5, 0.1), (2, 'bee', 1.5, 0.2), (3, NULL, 3.0, 0.3);"
    )
    connection.close()
    write_questions(folder / "questions.json", [("shop", sql, "simple") for sql in FIVE.values()], ids=list(FIVE))
    return folder


def example(folder: Path, sql: str) -> Example:
    database = Database("shop", path=folder / "databases" / "shop" / "shop.sqlite")
    return Example("q", "shop", "?", sql, database)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["note"])
def test_what_a_gold_is_worth(shop: Path, case: dict[str, Any]) -> None:
    with Sandbox() as sandbox:
        gold = examine(sandbox, example(shop, case["sql"]), Limits(seconds=5)).gold
    assert (gold.status, sorted(gold.flags)) == (case["status"], sorted(case["flags"]))
    assert gold.usable is case["usable"]


def test_five_golds_that_public_reports_tell_of(shop: Path, tmp_path: Path) -> None:
    where = ["--questions", str(shop / "questions.json"), "--databases", str(shop / "databases")]
    figures = audit(parse_audit([*where, "--gold-seconds", "1"]))
    assert {e["question_id"]: e["status"] for e in figures["golds"]} == {
        "slow": "gold_timeout",
        "broken": "gold_error",
        "tie": "gold_tie",
        "clock": "gold_clock",
        "good": "ok",
    }
    assert (figures["questions"], figures["usable"], figures["distinct_golds"]) == (5, 3, 5)
    assert figures["ceiling"] == {"n": 3, "official": 1.0, "n_upstream": 5, "upstream": 0.6}
    assert set(figures["flagged"]) == {"gold_timeout", "gold_error", "gold_tie", "gold_clock"}

    argv = arguments(shop, tmp_path / "out", "--gold-seconds", "1", "--engine", "canned", "--turn", SUBMIT_1)
    for workers in ("1", "16"):
        argv[argv.index("--out") + 1] = str(tmp_path / workers)
        summary = evaluate(parse([*argv, "--workers", workers]))
        assert (summary["n"], summary["n_questions"], summary["official"]) == (3, 5, 0.0)
        assert {item["question_id"] for item in summary["excluded"]} == {"slow", "broken"}
        assert summary["gold"]["flagged"] == figures["flagged"]
        assert summary["gold"]["official_without"] == {"gold_clock": 0.0, "gold_tie": 0.0}
    assert (tmp_path / "1" / "episodes.jsonl").read_bytes() == (tmp_path / "16" / "episodes.jsonl").read_bytes()


def test_gold_as_prediction_is_its_second_run(shop: Path, tmp_path: Path) -> None:
    golds = [("shop", sql, "") for sql in ("SELECT random()", "SELECT 1", "SELECT CAST(x'ff' AS TEXT)", "SELECT nope")]
    write_questions(tmp_path / "questions.json", golds)
    where = ["--questions", str(tmp_path / "questions.json"), "--databases", str(shop / "databases")]
    figures = audit(parse_audit(where))
    assert figures["ceiling"] == {"n": 3, "official": pytest.approx(2 / 3), "n_upstream": 4, "upstream": 0.25}
    assert figures["undecodable"] == 1


def test_flags_can_be_left_out_by_name(shop: Path, tmp_path: Path) -> None:
    argv = arguments(shop, tmp_path / "out", "--gold-seconds", "1", "--exclude", "gold_tie", "--exclude", "gold_clock")
    summary = evaluate(parse(argv))
    assert (summary["n"], summary["official"]) == (1, 1.0)
    assert {i["question_id"]: i["status"] for i in summary["excluded"]} == {
        "slow": "gold_timeout",
        "broken": "gold_error",
        "tie": "gold_tie",
        "clock": "gold_clock",
    }
    assert "flagged gold_clock or gold_tie" in summary["exclusion_rule"]
    with pytest.raises(SetupError, match="--exclude gold_error names no flag"):
        parse([*argv, "--exclude", "gold_error"])


def test_without_the_audit_a_gold_runs_once_and_ties_stay_unknown(shop: Path) -> None:
    with Sandbox() as sandbox:
        assert examine(sandbox, example(shop, FIVE["tie"]), Limits(seconds=5), audit=False).gold.flags == ()
        assert examine(sandbox, example(shop, FIVE["clock"]), Limits(seconds=5), audit=False).gold.flags == (
            "gold_clock",
        )


def test_a_gold_that_asks_the_clock_runs_again_for_each_answer(shop: Path) -> None:
    asked = example(shop, "SELECT random()")
    with Sandbox() as sandbox:
        book = GoldBook(sandbox, Limits(seconds=5), bird.score_results)
        assert book.gold(asked).status == "gold_clock"
        assert book.result(asked)[1].rows != book.result(asked)[1].rows


# ---- the cache


def test_results_come_back_from_disk_as_they_were(shop: Path, tmp_path: Path) -> None:
    cells = "SELECT 1, 0.1, 9e999, NULL, 'é', x'00ff', CAST(x'4dfc' AS TEXT), 9223372036854775807, '{\"b\": \"00\"}'"
    asked, cache = example(shop, cells), GoldCache(tmp_path)
    with Sandbox() as sandbox:
        examined = examine(sandbox, asked, Limits(seconds=5))
    cache.put(asked, Limits(seconds=5), True, examined)
    kept = cache.get(asked, Limits(seconds=5), True)
    assert kept is not None
    assert kept.result is not None
    assert kept.gold == examined.gold
    (row,) = kept.result.rows
    assert row == (1, 0.1, float("inf"), None, "é", b"\x00\xff", BadText(b"M\xfc"), 2**63 - 1, '{"b": "00"}')
    assert [type(cell) for cell in row[:2]] == [int, float]


def test_the_key_covers_what_the_result_hangs_on(shop: Path, tmp_path: Path) -> None:
    asked, cache, limits = example(shop, FIVE["good"]), GoldCache(tmp_path), Limits(seconds=5)
    path = cache.path(asked, limits, True)
    other = Example("q", "shop", "?", FIVE["tie"], asked.database)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(asked.database.path.read_bytes() if asked.database.path else b"")
    connection = sqlite3.connect(copy)
    connection.execute("DELETE FROM item")
    connection.commit()
    connection.close()
    elsewhere = Example("q", "shop", "?", FIVE["good"], Database("shop", path=copy))
    paths = {
        path,
        cache.path(other, limits, True),
        cache.path(elsewhere, limits, True),
        cache.path(asked, Limits(seconds=6), True),
        cache.path(asked, limits, False),
    }
    assert len(paths) == 5
    assert f"sqlite-{sqlite3.sqlite_version}" in str(path)
    assert asked.database.content_hash in str(path)


@pytest.mark.parametrize("name", ["slow", "clock"])
def test_what_would_come_out_otherwise_is_not_kept(shop: Path, tmp_path: Path, name: str) -> None:
    asked, cache, limits = example(shop, FIVE[name]), GoldCache(tmp_path), Limits(seconds=0.5)
    with Sandbox() as sandbox:
        cache.put(asked, limits, True, examine(sandbox, asked, limits))
    assert cache.get(asked, limits, True) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"gold": 1}', b"\xff", b'{"gold": {"flags": []}, "rows": null}']
)
def test_a_damaged_entry_is_a_miss(shop: Path, tmp_path: Path, content: bytes) -> None:
    asked, cache, limits = example(shop, FIVE["good"]), GoldCache(tmp_path), Limits(seconds=5)
    path = cache.path(asked, limits, True)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert cache.get(asked, limits, True) is None


def test_a_cache_that_cannot_be_written_is_said_once_and_done_without(shop: Path, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("")
    cache = GoldCache(tmp_path / "file", said.append)
    with Sandbox() as sandbox:
        book = GoldBook(sandbox, Limits(seconds=5), bird.score_results, cache=cache)
        assert book.gold(example(shop, FIVE["good"])).status == "ok"
        assert book.gold(example(shop, FIVE["tie"])).status == "gold_tie"
    assert len(said) == 1
    assert "cannot be written" in said[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_home_is_no_error(shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert evaluate(parse(arguments(shop, tmp_path / "out", "--gold-seconds", "1")))["n"] == 3


# ---- what the text says


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order\n by a LIMIT 3;", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'ORDER BY' FROM t -- ORDER BY a", False),
        ('SELECT "order" by FROM t /* ORDER BY */', False),
        ("SELECT ')' FROM t WHERE a IN ('(') ORDER BY a", True),
        ("WITH x AS (SELECT 1 ORDER BY 1) SELECT * FROM x", False),
        ("ORDER", False),
        ("", False),
    ],
)
def test_an_order_is_seen_at_the_top_level_only(sql: str, ordered: bool) -> None:
    assert orders_result(sql) is ordered


@pytest.mark.parametrize(
    ("sql", "asks"),
    [
        ("SELECT CURRENT_TIMESTAMP", True),
        ("SELECT strftime('%Y', 'NOW') - strftime('%Y', born) FROM t", True),
        ("SELECT date()", True),
        ("SELECT strftime('%Y')", True),
        ("SELECT abs(random()) % 6", True),
        ("SELECT julianday(born, 'start of month') FROM t WHERE a = 'now'", False),
        ("SELECT date FROM t", False),
        ("SELECT 'date(''now'')', \"current_date\"", False),
        ("SELECT max(date(born)) FROM t", False),
        ("SELECT date(max(born), 'now'", True),
    ],
)
def test_the_clock_is_seen_in_calls_only(sql: str, asks: bool) -> None:
    assert asks_the_clock(sql) is asks


def test_ties_are_cut_in_every_level_that_has_an_order_and_a_limit() -> None:
    sql = "SELECT a FROM t WHERE b = (SELECT max(c), d FROM u ORDER BY e LIMIT 1) AND 'LIMIT' ORDER BY f -- x\nLIMIT 2"
    up, down = tie_variants(sql, 1)
    assert up.count(" ASC") == down.count(" DESC") == 3
    assert "ORDER BY e , 1 DESC, 2 DESC LIMIT 1)" in down
    assert down.endswith("ORDER BY f -- x\n, 1 DESC LIMIT 2")
    assert tie_variants("SELECT a FROM t LIMIT 3", 1) == []
    assert tie_variants("SELECT a FROM (SELECT a FROM t ORDER BY a) LIMIT 3", 1) == []
    assert "ORDER BY b , 1 ASC LIMIT" in tie_variants("SELECT 1 FROM (SELECT * FROM t ORDER BY b LIMIT 3)", 1)[0]


# ---- the command


def test_the_command_prints_every_rule_with_its_denominator(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    where = ["--questions", str(shop / "questions.json"), "--databases", str(shop / "databases")]
    assert main([*where, "--gold-seconds", "1", "--out", str(tmp_path / "audit")]) == 1
    out = capsys.readouterr().out
    for text in ("custom: 5 questions", "gold_tie", "20.0%", "left out", "counts", "5 distinct golds; of 3 usable"):
        assert text in out
    assert "gold as prediction: 1.0000 over the 3 usable golds; 0.6000 over all 5" in out
    written = json.loads((tmp_path / "audit" / AUDIT).read_text())
    assert written["rules"].keys() > RULES.keys()
    assert [entry["question_id"] for entry in written["golds"]] == list(FIVE)


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "eval.audit", "--benchmark", "bird", "--data", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: benchmark bird is not under")


def test_golds_known_to_hang_on_an_open_order_are_found(test_data: Path) -> None:
    figures = audit(parse_audit(["--benchmark", "bird", "--data", str(test_data / "data"), "--db", "superhero"]))
    # 751 and 812 have a LIMIT without an ORDER BY; 794 cuts through equal values, which the PRAGMA does not show.
    assert figures["flagged"]["gold_tie"] == ["751", "794", "812"]
    assert figures["ceiling"]["official"] == 1.0
    figures = audit(parse_audit(["--benchmark", "spider", "--data", str(test_data / "data")]))
    assert "spider_dev_00425" in figures["flagged"]["gold_float"]  # a sum of floats
    assert figures["ceiling"]["upstream"] == 1.0


def test_records_hold_golds_that_read_back() -> None:
    gold = Gold("gold_tie", "", 3, "rows", True, ("gold_tie", "gold_float"), False)
    assert Gold.from_json(json.loads(json.dumps(gold.to_json()))) == gold
