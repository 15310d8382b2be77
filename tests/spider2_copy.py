"""A copy of Spider 2.0-lite's local part, laid out as its repository is, with tiny databases of our own."""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.data.spider2 import question_ids

GOLD = "total\n6\n"


def write_copy(
    root: Path,
    *,
    ids: Mapping[str, str] | None = None,
    golds: Mapping[str, Mapping[str, str]] | None = None,
    condition_cols: Mapping[str, Any] | None = None,
    sql: Mapping[str, str] | None = None,
    documents: Mapping[str, str] | None = None,
) -> Path:
    """Write it below `root` and return the question file.

    `ids` are the questions (default: all that are published), each on its database `item(n)` = 1, 2, 3. `golds` are CSV
    texts by id and file suffix (default: one table that says 6), `sql` gold queries by id, `documents` texts by id.
    """
    ids, golds, sql, documents = ids or question_ids(), golds or {}, sql or {}, documents or {}
    gold, databases = root / "evaluation_suite" / "gold", root / "resource" / "databases" / "spider2-localdb"
    for folder in (gold / "exec_result", gold / "sql", databases, root / "resource" / "documents"):
        folder.mkdir(parents=True)
    rows = [{"instance_id": "bq001", "db": "elsewhere", "question": "On a server?", "external_knowledge": None}]
    entries = []
    for question_id, db in ids.items():
        document = f"{question_id}.md" if question_id in documents else None
        rows.append({"instance_id": question_id, "db": db, "question": "The total?", "external_knowledge": document})
        columns = (condition_cols or {}).get(question_id, [])
        entries.append({"instance_id": question_id, "condition_cols": columns, "ignore_order": True, "toks": "9"})
        for suffix, text in golds.get(question_id, {"_a": GOLD}).items():
            (gold / "exec_result" / f"{question_id}{suffix}.csv").write_text(text)
    for db in set(ids.values()):
        connection = sqlite3.connect(databases / f"{db}.sqlite")
        connection.executescript("CREATE TABLE item (n INTEGER); INSERT INTO item VALUES (1), (2), (3);")
        connection.close()
    for question_id, text in sql.items():
        (gold / "sql" / f"{question_id}.sql").write_text(text)
    for question_id, text in documents.items():
        (root / "resource" / "documents" / f"{question_id}.md").write_text(text)
    for path, lines in ((root / "spider2-lite.jsonl", rows), (gold / "spider2lite_eval.jsonl", entries)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root / "spider2-lite.jsonl"


def databases_of(questions: Path) -> Path:
    return questions.parent / "resource" / "databases" / "spider2-localdb"
