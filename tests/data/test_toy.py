"""Toy questions: pure functions of the seed, disjoint by split, never right by luck, always in need of looking."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from shared.data.bird import load_questions
from shared.data.toy import (
    FIRST_SYLLABLES,
    KINDS,
    SECOND_SYLLABLES,
    SUFFIXES,
    ToyQuestion,
    main,
    toy_examples,
    toy_names,
    toy_questions,
    write_toy,
)
from shared.errors import SetupError
from shared.sql.results import official_equal
from shared.sql.structure import gold_length

QUESTIONS = {split: toy_questions(split, 30, 240, seed=3) for split in ("train", "heldout")}  # type: ignore[arg-type]
BOTH = [question for questions in QUESTIONS.values() for question in questions]


def names_of(question: ToyQuestion) -> set[str]:
    tables = question.database.tables
    return {table.name for table in tables} | {column for table in tables for column in table.columns}


def run(question: ToyQuestion, sql: str) -> list[tuple[int, ...]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        question.database.fill(connection)
        return connection.execute(sql).fetchall()


def test_splits_share_syllables_and_suffixes_but_no_name() -> None:
    train, heldout = set(toy_names("train")), set(toy_names("heldout"))
    assert not train & heldout
    assert len(heldout) >= 150
    for names in (train, heldout):
        assert {first for first, _ in names} == set(FIRST_SYLLABLES)
        assert {second for _, second in names} == set(SECOND_SYLLABLES)
    asked = {split: set().union(*map(names_of, questions)) for split, questions in QUESTIONS.items()}
    assert not asked["train"] & asked["heldout"]


def test_names_cannot_be_mistaken_for_one_another() -> None:
    assert not set(FIRST_SYLLABLES) & set(SECOND_SYLLABLES)
    for question in BOTH:
        names = names_of(question)
        assert len(names) == sum(1 + len(table.columns) for table in question.database.tables)
        syllables = [name[i : i + 2] for name in names for i in (0, 2)]
        assert len(set(syllables)) == len(syllables)


def test_kinds_and_databases_are_spread_evenly() -> None:
    for questions in QUESTIONS.values():
        for key in ("kind", "database"):
            values = [getattr(question, key) for question in questions]
            counts = [values.count(value) for value in dict.fromkeys(values)]
            assert max(counts) - min(counts) <= 1
        assert {question.kind for question in questions} == set(KINDS)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_no_other_kind_of_query_gives_the_gold_result(split: str) -> None:
    for question in QUESTIONS[split]:
        gold = run(question, question.gold_sql)
        assert gold
        for kind in question.table.kinds:
            suffixes = question.database.table_suffix, question.database.column_suffix
            assert official_equal(run(question, question.sql(*suffixes, kind)), gold) == (kind == question.kind)


def test_a_query_with_the_names_of_the_question_fails() -> None:
    for question in BOTH:
        for suffixes in (("", ""), (question.database.table_suffix, "")):
            if question.kind == "count" and suffixes[0]:
                continue  # it needs no column
            with pytest.raises(sqlite3.OperationalError, match=r"no such (table|column)"):
                run(question, question.sql(*suffixes))


def test_the_question_gives_no_suffix_away() -> None:
    for question in BOTH:
        assert not any(suffix in question.text for suffix in SUFFIXES)
        assert question.database.table_suffix != question.database.column_suffix
        words = set(re.findall(r"\w+", question.text))
        wanted = {question.table.name} if question.kind == "count" else {question.table.name, question.a}
        assert wanted <= words


def test_a_constant_answer_is_worth_nothing() -> None:
    assert not any(official_equal([(1,)], run(question, question.gold_sql)) for question in BOTH)


def test_gold_queries_differ_in_length() -> None:
    lengths = {kind: {gold_length(q.gold_sql) for q in BOTH if q.kind == kind} for kind in KINDS}
    assert max(lengths["count"]) < min(lengths["group"]) < min(lengths["join_where"])


def test_the_same_arguments_give_the_same_questions() -> None:
    assert toy_questions("train", 5, 40, seed=7) == toy_questions("train", 5, 40, seed=7)
    texts = [[q.text for q in toy_questions("train", 5, 40, seed=seed)] for seed in (7, 8)]
    assert texts[0] != texts[1]


def test_written_questions_load_again_and_their_gold_runs(tmp_path: Path) -> None:
    examples = toy_examples("heldout", 4, 24, 0, tmp_path)
    loaded = load_questions(tmp_path / "questions.json", tmp_path / "databases", "toy")
    assert [(e.question_id, e.db_id, e.question, e.gold_sql, e.difficulty) for e in examples] == [
        (e.question_id, e.db_id, e.question, e.gold_sql, e.difficulty) for e in loaded
    ]
    assert [e.database.path for e in examples] == [e.database.path for e in loaded]
    for example, question in zip(examples, toy_questions("heldout", 4, 24, 0), strict=True):
        assert example.database.path is not None
        with closing(sqlite3.connect(example.database.path)) as connection:
            assert connection.execute(example.gold_sql).fetchall() == run(question, question.gold_sql)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["databases", "questions.json"]


def test_a_finished_folder_is_kept_and_another_one_is_refused(tmp_path: Path) -> None:
    toy_examples("train", 3, 12, 0, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    toy_examples("train", 3, 12, 0, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(SetupError, match="other questions"):
        toy_examples("train", 3, 12, 1, tmp_path)


def test_an_interrupted_folder_is_completed(tmp_path: Path) -> None:
    questions = toy_questions("train", 3, 12, 0)
    write_toy(questions, tmp_path)
    (tmp_path / "questions.json").unlink()
    write_toy(questions, tmp_path)
    assert len(json.loads((tmp_path / "questions.json").read_text())) == 12


@pytest.mark.parametrize(("databases", "questions"), [(0, 5), (5, 0), (5, 4), (-1, 3)])
def test_impossible_counts_are_refused(databases: int, questions: int) -> None:
    with pytest.raises(SetupError, match="at least one question a database"):
        toy_questions("train", databases, questions, 0)


def test_unknown_split_and_unwritable_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="'dev' does not exist"):
        toy_questions("dev", 1, 1, 0)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        toy_examples("train", 1, 1, 0, tmp_path / "file" / "inside")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--split", "heldout", "--databases", "2", "--questions", "12", "--seed", "4", "--out", str(tmp_path)]
    main(arguments)
    assert "12 heldout questions over 2 databases" in capsys.readouterr().out
    with pytest.raises(SetupError):
        main([*arguments[:-3], "5", "--out", str(tmp_path)])
