"""A benchmark that attacks whatever shows it: hostile text as cells, names, questions, golds and database ids."""

import json
import sqlite3
from pathlib import Path

from tests.eval.agents import HOSTILE

DB_ID = 'evil <b>"&$x$ db'
TABLE = "<img src=x onerror=alert(1)>"


def write_hostile(folder: Path) -> Path:
    """questions.json over databases/<DB_ID>, and a plain database beside it; returns the folder."""
    quoted = TABLE.replace('"', '""')
    scripts = {
        DB_ID: f'CREATE TABLE "{quoted}" (id INTEGER, "</script><b>" TEXT);',
        "plain": "CREATE TABLE item (id INTEGER, name TEXT);INSERT INTO item VALUES (1, 'ant'), (2, 'bee'), (3, NULL);",
    }
    for name, script in scripts.items():
        (folder / "databases" / name).mkdir(parents=True)
        connection = sqlite3.connect(folder / "databases" / name / f"{name}.sqlite")
        connection.executescript(script)
        if name == DB_ID:
            rows = [(1, HOSTILE), (2, "</script>"), (3, "\u2028 line"), (4, "| pipe | and `tick`")]
            connection.executemany(f'INSERT INTO "{quoted}" VALUES (?, ?)', rows)
        connection.commit()
        connection.close()
    evil = [(DB_ID, HOSTILE, f'SELECT * FROM "{quoted}"', "<i>simple</i>")] * 6
    plain = [
        ("plain", f"How many items are there, {i}?", "SELECT count(*) FROM item WHERE id > 0", "simple")
        for i in range(34)
    ]
    questions = [
        {
            "question_id": f"q{i}" if i else "q<0>",
            "db_id": db,
            "question": question,
            "query": sql,
            "difficulty": difficulty,
            "evidence": HOSTILE if db == DB_ID else "",
        }
        for i, (db, question, sql, difficulty) in enumerate([*evil, *plain])
    ]
    (folder / "questions.json").write_text(json.dumps(questions))
    return folder
