"""The loader of Spider 2.0-lite: which questions there are, what each needs, and what a copy may lack."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from shared.data.spider2 import published, question_ids, read_spider2
from shared.errors import SetupError
from tests.spider2_copy import databases_of, write_copy

TWO = {"local002": "E_commerce", "local009": "Airlines"}


def test_the_published_list_is_135_questions_and_our_guess_87_of_them() -> None:
    everything, guess = question_ids(), question_ids("guess87")
    assert (len(everything), len(set(everything.values()))) == (135, 30)
    assert (len(guess), len(set(guess.values()))) == (87, 23)
    left_out = set(published()["guess87"]["databases_left_out"])
    assert {q for q, db in everything.items() if db not in left_out} == set(guess)
    assert "guess" in published()["guess87"]["status"]
    with pytest.raises(SetupError, match="unknown subset 87"):
        question_ids("87")


def test_a_whole_copy_is_read_in_its_order(tmp_path: Path) -> None:
    questions = write_copy(tmp_path, documents={"local002": "Totals are sums.\n"}, sql={"local009": "SELECT 6"})
    loaded = read_spider2(questions, databases_of(questions))
    assert [example.question_id for example in loaded.examples] == list(question_ids())
    assert loaded.skipped == {"not local": 1}
    first = loaded.examples[0]
    assert (first.question_id, first.db_id, first.evidence, first.gold_sql) == (
        "local002",
        "E_commerce",
        "Totals are sums.",
        "",
    )
    assert (first.benchmark, first.meta["condition_cols"], first.meta["ignore_order"]) == ("spider2", [], True)
    assert {e.gold_sql for e in loaded.examples} == {"", "SELECT 6"}
    guess = read_spider2(questions, databases_of(questions), subset="guess87")
    assert (len(guess.examples), guess.skipped["not in the subset"]) == (87, 48)
    ipl = read_spider2(questions, databases_of(questions), db_ids=["IPL"])
    assert {e.db_id for e in ipl.examples} == {"IPL"}
    assert ipl.skipped["on other databases"] == 124


def test_what_a_copy_lacks_is_named_and_left_out_only_when_asked(tmp_path: Path) -> None:
    questions = write_copy(tmp_path, ids=TWO, documents={"local009": "Distances."})
    databases = databases_of(questions)
    with pytest.raises(SetupError, match=r"lacks 133 of the 135 published questions \(local003, .* and 125 more\)"):
        read_spider2(questions, databases)
    (databases / "Airlines.sqlite").unlink()
    loaded = read_spider2(questions, databases, present_only=True)
    assert [e.question_id for e in loaded.examples] == ["local002"]
    assert loaded.skipped == {"not local": 1, "not in the question file": 133, "on absent databases": 1}
    (databases / "E_commerce.sqlite").rename(databases / "Airlines.sqlite")
    (questions.parent / "resource" / "documents" / "local009.md").unlink()
    with pytest.raises(SetupError, match=r"no question of .* is left .*1 with an absent document"):
        read_spider2(questions, databases, present_only=True)


def test_absent_databases_are_all_named(tmp_path: Path) -> None:
    questions = write_copy(tmp_path)
    for db in ("f1", "log"):
        (databases_of(questions) / f"{db}.sqlite").unlink()
    with pytest.raises(SetupError, match=r"2 of 30 spider2 databases are not in .* \(f1, log\)"):
        read_spider2(questions, databases_of(questions))


def test_identity_of_a_gold_covers_tables_and_how_they_are_compared(tmp_path: Path) -> None:
    copies = {
        "plain": {},
        "again": {},
        "table": {"golds": {"local002": {"_a": "total\n7\n"}}},
        "second": {"golds": {"local002": {"_a": "total\n6\n", "_b": "total\n6\n"}}},
        "columns": {"condition_cols": {"local002": [0]}},
    }
    digests = {}
    for name, options in copies.items():
        questions = write_copy(tmp_path / name, ids=TWO, **options)  # type: ignore[arg-type]
        loaded = read_spider2(questions, databases_of(questions), present_only=True)
        digests[name] = loaded.examples[0].meta["gold_sha256"]
    assert digests["plain"] == digests["again"]
    assert len(set(digests.values())) == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no_tables", r"no gold result local002\.csv or local002_a\.csv"),
        ("no_gold", "the gold tables of spider2 are not at"),
        ("no_entries", "it says how gold tables are compared"),
        ("no_entry", "no line of .* is on local002"),
        ("no_document", r"local002\.md does not exist"),
        ("twice", "gives local002 more than once"),
        ("moved", "local002 is not the published question on E_commerce"),
        ("other", "line 1 has no instance_id: is it spider2-lite.jsonl"),
        ("not_sqlite", "is not a SQLite database"),
    ],
)
def test_a_damaged_copy_is_one_line(tmp_path: Path, damage: str, message: str) -> None:
    questions = write_copy(tmp_path, documents={"local002": "Text."})
    gold = questions.parent / "evaluation_suite" / "gold"
    lines = questions.read_text().splitlines(keepends=True)
    if damage == "no_tables":
        (gold / "exec_result" / "local002_a.csv").unlink()
    elif damage == "no_gold":
        (gold / "exec_result").rename(gold / "elsewhere")
    elif damage == "no_entries":
        (gold / "spider2lite_eval.jsonl").unlink()
    elif damage == "no_entry":
        entries = (gold / "spider2lite_eval.jsonl").read_text().splitlines(keepends=True)
        (gold / "spider2lite_eval.jsonl").write_text("".join(entries[1:]))
    elif damage == "no_document":
        (questions.parent / "resource" / "documents" / "local002.md").unlink()
    elif damage == "twice":
        questions.write_text("".join([*lines, lines[1]]))
    elif damage == "moved":
        questions.write_text("".join(lines).replace("E_commerce", "Airlines", 1))
    elif damage == "other":
        questions.write_text('{"question": "?"}\n')
    else:
        (databases_of(questions) / "E_commerce.sqlite").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(SetupError, match=message) as error:
        read_spider2(questions, databases_of(questions))
    assert "\n" not in str(error.value)


def test_the_guess_follows_the_schemas_that_ship_with_the_benchmark(test_data: Path) -> None:
    folder = test_data / "data" / "spider2_lite"
    left_out = set(published()["guess87"]["databases_left_out"])
    for path in sorted((folder / "resource" / "databases" / "sqlite").glob("*/DDL.csv")):
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            tables = sum(1 for _ in csv.DictReader(file))
        assert (tables > 18) is (path.parent.name in left_out), path.parent.name


def test_the_real_question_file_agrees_with_the_published_list(test_data: Path) -> None:
    folder = test_data / "data" / "spider2_lite"
    rows = [json.loads(line) for line in (folder / "spider2-lite.local.jsonl").read_text().splitlines()]
    assert {row["instance_id"]: row["db"] for row in rows}.items() <= question_ids().items()
    loaded = read_spider2(folder / "spider2-lite.local.jsonl", folder / "sample_dbs", present_only=True)
    assert len(loaded.examples) == len(rows)
    assert sum(bool(e.gold_sql) for e in loaded.examples) == len(list((folder / "gold" / "sql").glob("*.sql")))
    with_document = Counter(bool(e.evidence) for e in loaded.examples)[True]
    assert with_document == sum(bool(row["external_knowledge"]) for row in rows)
