"""The check of downloaded benchmarks: whole, partial, absent; what is missing is named and nothing is touched."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from eval.benchmarks import BENCHMARKS
from tests.spider2_copy import databases_of, write_copy

ROOT = Path(__file__).resolve().parents[2]


def check(data: Path, *names: str) -> tuple[int, str]:
    command = [sys.executable, "scripts/prepare_data.py", "--data", str(data), *names]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    return result.returncode, result.stdout + result.stderr


def write_database(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t (a)")
    connection.commit()
    connection.close()


def write_spider(data: Path, questions: int = 1034, databases: int = 20) -> Path:
    folder = data / "spider"
    folder.mkdir(parents=True)
    rows = [{"db_id": f"db{i % 20}", "question": "?", "query": "SELECT 1"} for i in range(questions)]
    (folder / "dev.json").write_text(json.dumps(rows))
    for i in range(databases):
        write_database(folder / "database" / f"db{i}" / f"db{i}.sqlite")
    return folder


def test_nothing_there_is_no_error_unless_it_was_named(tmp_path: Path) -> None:
    code, text = check(tmp_path)
    assert (code, text.count("absent ")) == (0, len(BENCHMARKS))
    assert "bird-bench.github.io" in text
    code, text = check(tmp_path, "spider")
    assert code == 1
    assert f"{tmp_path / 'spider' / 'dev.json'} is missing" in text
    assert list(tmp_path.iterdir()) == []


def test_a_whole_copy(tmp_path: Path) -> None:
    folder = write_spider(tmp_path)
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    code, text = check(tmp_path, "spider")
    assert code == 0, text
    assert "ok      spider" in text
    assert "1,034 of the 1,034 published questions" in text
    assert "20 of 20 databases are there and open" in text
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    folder = write_spider(tmp_path, questions=100, databases=19)
    (folder / "database" / "db3" / "db3.sqlite").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "database" / "db4" / "db4.sqlite").write_bytes(b"SQLite format 3\x00" + bytes(200))
    code, text = check(tmp_path, "spider")
    assert code == 1
    assert "100 of the 1,034 published questions" in text
    assert f"1 databases are missing (db19): put each at {folder / 'database'}/<name>/<name>.sqlite" in text
    assert "5 questions need them" in text
    assert "db3.sqlite is not a SQLite database" in text
    assert "database db4" in text
    assert "add --present-only" in text


def test_spider2_checks_ids_tables_and_documents(tmp_path: Path) -> None:
    questions = write_copy(
        tmp_path / "spider2-lite", documents={"local009": "Distances."}, sql={"local002": "SELECT 6"}
    )
    code, text = check(tmp_path, "spider2")
    assert code == 0, text
    assert "135 of the 135 published questions" in text
    assert "gold tables for 135 questions that can be asked, gold queries for 1" in text
    (databases_of(questions) / "f1.sqlite").unlink()
    (questions.parent / "resource" / "documents" / "local009.md").unlink()
    code, text = check(tmp_path, "spider2")
    assert code == 1
    assert "1 databases are missing (f1)" in text
    assert "9 questions need them" in text
    assert "documents of 1 questions are missing" in text


def test_an_unknown_name_is_one_line(tmp_path: Path) -> None:
    code, text = check(tmp_path, "birds")
    assert (code, text.count("\n")) == (2, 1)
    assert text.startswith("error: unknown benchmark birds: one of bird, ")


def test_the_copies_at_hand(test_data: Path) -> None:
    code, text = check(test_data / "data", "sqale", "kaggledbqa")
    assert code == 1
    assert "ok      sqale" in text
    assert "2 of 2 databases are there and open" in text


@pytest.mark.parametrize("name", ["bird", "bird-mini", "spider", "spider2", "kaggledbqa", "sqale"])
def test_every_benchmark_says_where_it_comes_from(name: str) -> None:
    assert len(BENCHMARKS[name].source) > 20
