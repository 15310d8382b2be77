"""Fixtures for the tests of the sandbox."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.database import Database
from shared.sql.sandbox import Sandbox
from shared.tools.case_database import DEFAULT_SQL


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """A pool of two workers, shared by a module's tests."""
    with Sandbox(workers=2) as pool:
        yield pool


def make(path: Path, sql: str = DEFAULT_SQL) -> Database:
    """A database file from a script (default: three items)."""
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()
    return Database(path.stem, path=path)


@pytest.fixture
def items(tmp_path: Path) -> Database:
    """item(id, name, price) with three rows."""
    return make(tmp_path / "items.sqlite")
