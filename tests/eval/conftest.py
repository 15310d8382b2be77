"""The small benchmark that the evaluation tests run on."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eval.runs import GOLDS, write_questions


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test finds gold results that another run of the tests has left, and none leaves any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """questions.json over databases/shop and databases/city (with text that is not UTF-8)."""
    folder = tmp_path_factory.mktemp("data")
    scripts = {
        "shop": "CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price REAL);"
        "INSERT INTO item VALUES (1, 'ant', 1.5), (2, 'bee', 2.25), (3, NULL, 3.0);",
        "city": "CREATE TABLE city (id INT, name TEXT);"
        "INSERT INTO city VALUES (1, 'Oslo'), (2, CAST(x'4dfc6e6368656e' AS TEXT));",
    }
    for name, script in scripts.items():
        (folder / "databases" / name).mkdir(parents=True)
        connection = sqlite3.connect(folder / "databases" / name / f"{name}.sqlite")
        connection.executescript(script)
        connection.close()
    write_questions(folder / "questions.json", GOLDS)
    return folder
