"""Databases for the tests of the tools, built from nasty_databases.sql and a few loops."""

import sqlite3
from pathlib import Path

from shared.database import Database


def build(folder: Path, name: str, script: str) -> Database:
    """A database file from a script."""
    path = folder / f"{name}.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(f"PRAGMA synchronous = OFF; BEGIN; {script}; COMMIT;")
    connection.close()
    return Database(name, path=path)


def nasty_databases(folder: Path) -> dict[str, Database]:
    """One database a section of nasty_databases.sql, and one each that is very wide and has very many tables."""
    scripts = {}
    for section in Path(__file__).with_name("nasty_databases.sql").read_text("utf-8").split("-- database ")[1:]:
        name, _, script = section.partition("\n")
        scripts[name] = script
    scripts["wide"] = (
        f"CREATE TABLE wide({', '.join(f'column_{i} INT' for i in range(2000))}); INSERT INTO wide DEFAULT VALUES;"
    )
    scripts["many"] = "".join(
        f"CREATE TABLE t{i}(id INTEGER PRIMARY KEY, t{max(i - 1, 0)}_id INT, user_id INT, created_at TEXT);"
        for i in range(1000)
    )
    return {name: build(folder, name, script) for name, script in scripts.items()}
