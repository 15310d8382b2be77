"""A small benchmark and its command lines, and run folders made by hand for tests of what reads them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.config import EvalConfig, parse_arguments
from eval.records import EPISODES, SUMMARY, to_line, write_json
from eval.summary import summarize

SUBMIT_1 = '{"tool": "submit_sql", "args": {"sql": "SELECT 1"}}'
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
GOLDS = [
    ("shop", "SELECT name FROM item ORDER BY price DESC", "simple"),
    ("shop", "SELECT count(*) FROM item WHERE id = 1", "simple"),
    ("shop", "SELECT min(id), 1.0 FROM item", "challenging"),
    ("shop", "SELECT id FROM item WHERE name = 'nobody'", "moderate"),
    ("shop", "SELECT CAST(id AS REAL) FROM item WHERE id = 1", "simple"),
    ("city", "SELECT name FROM city", "simple"),
    ("city", "SELECT '1'", "challenging"),
    ("city", "SELECT 1 FROM city", "moderate"),
]

IDENTITY = {"data_sha256": "d" * 64, "benchmark": "custom", "mode": "full", "model": "m", "engine": "gold"}


def record(question_id: str, official: float | None, **changes: Any) -> dict[str, Any]:
    """An episode record; `official` None is a question whose gold failed."""
    scores = None
    if official is not None:
        scores = {
            "official": {"rule": "bird_official", "score": official, "reason": ""},
            "strict": {"rule": "bird_strict", "score": changes.pop("strict", official), "reason": ""},
            "soft_f1": None,
            "pred_outcome": "ok",
        }
    return {
        "question_id": question_id,
        "sample": 0,
        "db_id": "shop",
        "difficulty": "simple",
        "question": "Which?",
        "evidence": "",
        "gold_sql": "SELECT 1",
        "gold": {"status": "ok" if scores else "gold_timeout", "shape": "rows", "undecodable": False},
        "status": "scored" if scores else "gold_timeout",
        "reason": "",
        "scores": scores,
        "results": None,
        "answer_sql": "SELECT 1",
        "origin": "submitted",
        "ended": "submitted",
        "truncated": False,
        "sampled_tokens": 10,
        "total_tokens": 100,
        "turns": [{"clean": True, "calls": [{"tool": "list_tables", "args": {}, "outcome": "ok", "text": "item"}]}],
        **changes,
    }


def write_run(folder: Path, records: Sequence[Mapping[str, Any]], **identity: Any) -> Path:
    """A finished run with these episodes."""
    folder.mkdir(parents=True)
    (folder / EPISODES).write_text("".join(map(to_line, records)))
    write_json(folder / SUMMARY, summarize(records, IDENTITY | identity))
    return folder


def write_questions(path: Path, golds: Sequence[tuple[str, str, str]], ids: Sequence[str] = ()) -> None:
    """A question a gold (database, SQL, difficulty); without `ids` they are q0, q1, …"""
    entries = [
        {
            "question_id": ids[i] if ids else f"q{i}",
            "db_id": db,
            "question": f"Question {i}?",
            "query": sql,
            "difficulty": difficulty,
        }
        for i, (db, sql, difficulty) in enumerate(golds)
    ]
    path.write_text(json.dumps(entries))


def parse(argv: Sequence[str]) -> EvalConfig:
    """The config of `eval.run`'s command line."""
    return parse_arguments(argv)


def arguments(data: Path, out: Path, *more: str, questions: str = "questions.json") -> list[str]:
    where = ["--questions", str(data / questions), "--databases", str(data / "databases"), "--out", str(out)]
    return [*where, *(("--engine", "gold") if "--engine" not in more else ()), *more]
