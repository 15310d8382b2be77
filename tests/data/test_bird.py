"""The loader for question files over a folder of databases: what it accepts, and what it says when it can't."""

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.data.bird import load_questions, read_questions
from shared.errors import SetupError

Q = {"db_id": "shop", "question": "How many?", "query": "SELECT count(*) FROM item"}


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    folder = tmp_path / "databases"
    for name in ("shop", "Zoo"):
        (folder / name).mkdir(parents=True)
        connection = sqlite3.connect(folder / name / f"{name}.sqlite")
        connection.execute("CREATE TABLE item (id INTEGER)")
        connection.commit()
        connection.close()
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "questions.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write


def test_spider_keys(databases: Path, write: Callable[[Any], Path]) -> None:
    # Spider's own files hold the parse tree under "sql" and the tokens beside it.
    spider = {**Q, "sql": {"select": []}, "query_toks": ["SELECT"], "split": "dev"}
    (example,) = load_questions(write([spider]), databases, "spider")
    assert example.gold_sql == Q["query"]
    assert (example.db_id, example.question, example.evidence, example.difficulty) == ("shop", "How many?", "", "")
    assert (example.question_id, example.benchmark, example.meta) == ("spider_00000", "spider", {"split": "dev"})
    assert example.database.path == databases / "shop" / "shop.sqlite"


def test_bird_keys(databases: Path, write: Callable[[Any], Path]) -> None:
    bird = {"db_id": "shop", "question": "How many?", "SQL": "SELECT 1", "evidence": "n", "difficulty": "simple"}
    (example,) = load_questions(write([{**bird, "question_id": 0}]), databases)
    assert (example.gold_sql, example.evidence, example.difficulty) == ("SELECT 1", "n", "simple")
    assert example.question_id == "0"
    (example,) = load_questions(write([{**bird, "evidence": None, "question_id": None}]), databases)
    assert (example.evidence, example.question_id) == ("", "custom_00000")


def test_lower_case_sql_and_untouched_text(databases: Path, write: Callable[[Any], Path]) -> None:
    (example,) = load_questions(write([{"db_id": "shop", "question": " é?\n", "sql": " SELECT 1; "}]), databases)
    assert (example.question, example.gold_sql) == (" é?\n", " SELECT 1; ")


def test_json_lines_and_byte_order_mark(databases: Path, write: Callable[[Any], Path]) -> None:
    lines = "\ufeff" + json.dumps(Q) + "\n\n" + json.dumps({**Q, "question": "a\u2028b"}, ensure_ascii=False) + "\r\n"
    examples = load_questions(write(lines), databases)
    assert [e.question_id for e in examples] == ["custom_00000", "custom_00001"]
    assert examples[1].question == "a\u2028b"


def test_generated_ids_do_not_depend_on_the_filters(databases: Path, write: Callable[[Any], Path]) -> None:
    path = write([Q, {**Q, "db_id": "Zoo"}, Q])
    (only,) = load_questions(path, databases, db_ids=["Zoo"])
    assert only.question_id == "custom_00001"
    assert read_questions(path, databases, db_ids=["Zoo"]).skipped == {"on other databases": 2}


def test_questions_on_one_database_share_it(databases: Path, write: Callable[[Any], Path]) -> None:
    first, second = load_questions(write([Q, Q]), databases)
    assert first.database is second.database


@pytest.mark.parametrize("suffix", [".db", ".sqlite3"])
def test_other_suffixes(suffix: str, databases: Path, write: Callable[[Any], Path]) -> None:
    file = databases / "shop" / "shop.sqlite"
    file.rename(file.with_suffix(suffix))
    assert load_questions(write([Q]), databases)[0].database.path == file.with_suffix(suffix)


def test_case_of_the_folder(databases: Path, write: Callable[[Any], Path]) -> None:
    (example,) = load_questions(write([{**Q, "db_id": "zoo"}]), databases)
    assert (example.db_id, example.database.path) == ("zoo", databases / "Zoo" / "Zoo.sqlite")
    shutil.copytree(databases / "Zoo", databases / "ZOO")
    with pytest.raises(SetupError, match=r"zoo could be any of .*ZOO.*Zoo"):
        load_questions(write([{**Q, "db_id": "zoo"}]), databases)
    assert load_questions(write([{**Q, "db_id": "Zoo"}]), databases)[0].database.path is not None


def test_absent_databases(databases: Path, write: Callable[[Any], Path]) -> None:
    path = write([Q, {**Q, "db_id": "gone", "question_id": 7}])
    with pytest.raises(SetupError, match=r"database gone of question 7 is not at .*gone/gone\.sqlite"):
        load_questions(path, databases)
    loaded = read_questions(path, databases, present_only=True)
    assert loaded.skipped == {"on absent databases": 1}
    assert loaded.summary() == "1 questions over 1 databases (left out: 1 on absent databases)"
    with pytest.raises(SetupError, match=r"no question of .* is left .1 on absent databases"):
        read_questions(write([{**Q, "db_id": "gone"}]), databases, present_only=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no questions"),
        ("[]", "holds no questions"),
        ("[1]", "entry 0 is not a JSON object"),
        ('"x"', "line 1 is not a JSON object"),
        ('[{"db_id": ', "not valid JSON"),
        ("{\n", "line 1 is not valid JSON"),
        (json.dumps(Q) + "\n{oops\n", "line 2 is not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ([{k: v for k, v in Q.items() if k != "db_id"}], "entry 0 has no key 'db_id'"),
        ([{k: v for k, v in Q.items() if k != "question"}], "entry 0 has no key 'question'"),
        ([{k: v for k, v in Q.items() if k != "query"}], "entry 0 has no gold query"),
        ([{**Q, "query": None}], "has no gold query"),
        ([{**Q, "query": ""}], "'query' must be a text that is not empty"),
        ([{**Q, "question": 5}], "'question' must be a text that is not empty, not 5"),
        ([{**Q, "evidence": ["x"]}], "'evidence' must be a text"),
        ([Q, {**Q, "difficulty": 1}], "entry 1: 'difficulty' must be a text"),
        ([{**Q, "question_id": True}], "'question_id' must be a text or an integer"),
        ([{**Q, "question_id": 1.5}], "'question_id' must be a text or an integer"),
        ([{**Q, "question_id": " "}], "'question_id' must be a text or an integer"),
        ([{**Q, "question_id": 1}, {**Q, "question_id": "1"}], "question_id 1 more than once"),
        ([{**Q, "question_id": i % 7} for i in range(14)], "question_id 0, 1, 2, 3, 4 and 2 more more than once"),
        ([Q, {**Q, "question_id": "custom_00000"}], "question_id custom_00000 more than once"),
        *[
            ([{**Q, "db_id": name}], "not a plain folder name")
            for name in ("..", ".", "../shop", "/etc", "a/b", "a\\b", "a\0b", "shop/../shop")
        ],
    ],
)
def test_unusable_files(content: Any, words: str, databases: Path, write: Callable[[Any], Path]) -> None:
    with pytest.raises(SetupError) as caught:
        load_questions(write(content), databases)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unusable_paths(databases: Path, write: Callable[[Any], Path], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"question file .*nowhere\.json cannot be read"):
        load_questions(tmp_path / "nowhere.json", databases)
    with pytest.raises(SetupError, match=r"question file .* cannot be read"):
        load_questions(tmp_path, databases)
    with pytest.raises(SetupError, match=r"database folder .*nowhere does not exist"):
        load_questions(write([Q]), tmp_path / "nowhere")
    (tmp_path / "latin.json").write_bytes(b'[{"db_id": "\xe9"}]')
    with pytest.raises(SetupError, match="not UTF-8"):
        load_questions(tmp_path / "latin.json", databases)
    with pytest.raises(SetupError, match=r"no question of .* is on database moon"):
        load_questions(write([Q]), databases, db_ids=["moon"])


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"SQLite"])
def test_a_file_that_is_not_sqlite(content: bytes, databases: Path, write: Callable[[Any], Path]) -> None:
    (databases / "shop" / "shop.sqlite").write_bytes(content)
    with pytest.raises(SetupError, match=r"shop\.sqlite is not a SQLite database"):
        load_questions(write([Q]), databases)


def test_loading_writes_nothing(databases: Path, write: Callable[[Any], Path], tmp_path: Path) -> None:
    path = write([Q])
    before = sorted(tmp_path.rglob("*"))
    load_questions(path, databases)
    assert sorted(tmp_path.rglob("*")) == before


def test_imports_are_light() -> None:
    code = (
        "import sys, shared.data.bird, shared.data.sqale, shared.tools.protocol\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'sqale', 'pandas', 'numpy', 'sqlglot'}\n"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("questions", "folder", "count", "absent"),
    [
        ("spider_dev/dev.json", "spider_dev/database", 574, 0),
        ("spider_train/train_spider.json", "spider_train/database", 4250, 0),
        ("spider_de_dev/dev.json", "spider_de_dev/database", 534, 0),
        ("kaggledbqa/questions.json", "kaggledbqa/databases", 60, 0),
        ("defog/questions.json", "defog/databases", 135, 0),
        ("bird_dev/dev.json", "bird_dev/dev_databases", 129, 845),
    ],
)
def test_real_benchmarks(questions: str, folder: str, count: int, absent: int, test_data: Path) -> None:
    root = test_data / "data"
    loaded = read_questions(root / questions, root / folder, present_only=True)
    assert len(loaded.examples) == count
    assert loaded.skipped.get("on absent databases", 0) == absent
    assert len({e.question_id for e in loaded.examples}) == count


def test_ids_that_a_benchmark_repeats_can_be_numbered(tmp_path: Path) -> None:
    rows = [{"question_id": i, "db_id": "shop", "question": "?", "SQL": "SELECT 1"} for i in (7, 8, 7, 7)]
    (tmp_path / "mini.json").write_text(json.dumps(rows))
    (tmp_path / "databases" / "shop").mkdir(parents=True)
    sqlite3.connect(tmp_path / "databases" / "shop" / "shop.sqlite").executescript("CREATE TABLE t (a)").close()
    with pytest.raises(SetupError, match="gives question_id 7 more than once"):
        read_questions(tmp_path / "mini.json", tmp_path / "databases")
    loaded = read_questions(tmp_path / "mini.json", tmp_path / "databases", number_repeats=True)
    assert [example.question_id for example in loaded.examples] == ["7", "8", "7#2", "7#3"]
