"""Spider 2.0-lite: the questions on local SQLite files, with gold tables (CSV files) instead of gold queries.

Which questions these are is published in `spider2_local.json` beside this file: 135 of the benchmark's 547. Every
one of them is expected to be there: a copy that lacks some is an error unless it is asked for. The benchmark's
documents ("external knowledge") go into the question's evidence. For 24 questions there is a gold query as well, not
all of which give the gold tables: they are for reading and for the scripted engine, an answer is only ever held
against the tables.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.data.bird import SUFFIXES, check_sqlite, read_records
from shared.data.example import Example, Loaded
from shared.database import Database
from shared.errors import SetupError

LIST = Path(__file__).with_name("spider2_local.json")
SUBSETS = ("all", "guess87")
_LOCAL = "local"
_GOLD_FOLDERS = ("evaluation_suite/gold", "gold")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


@cache
def published() -> Mapping[str, Any]:
    """The published list: `questions` (id -> database) and `guess87` (rule, status, questions)."""
    data: Mapping[str, Any] = json.loads(LIST.read_text(encoding="utf-8"))
    return data


def question_ids(subset: str = "all") -> Mapping[str, str]:
    """The ids of a subset, each with its database. SetupError for a subset that is not one of SUBSETS."""
    questions: Mapping[str, str] = published()["questions"]
    if subset == "all":
        return questions
    if subset not in SUBSETS:
        raise SetupError(f"unknown subset {subset} of spider2: one of {', '.join(SUBSETS)}")
    return {question_id: questions[question_id] for question_id in published()[subset]["questions"]}


@dataclass(frozen=True)
class _Source:
    """The files of one copy of the benchmark, beside its question file."""

    questions: Path
    databases: Path

    @property
    def gold(self) -> Path:
        candidates = [self.questions.parent / name for name in _GOLD_FOLDERS]
        for folder in candidates:
            if (folder / "exec_result").is_dir():
                return folder
        raise SetupError(f"the gold tables of spider2 are not at {candidates[0] / 'exec_result'}: put them there")

    @property
    def documents(self) -> Path:
        return self.questions.parent / "resource" / "documents"


def read_spider2(
    questions: Path,
    databases: Path,
    *,
    subset: str = "all",
    db_ids: Iterable[str] = (),
    present_only: bool = False,
) -> Loaded:
    """The questions of `subset` that are asked of local databases, in the order of the question file.

    `questions` is spider2-lite.jsonl in its place in the repository: gold tables (evaluation_suite/gold) and documents
    (resource/documents) are found from there. `databases` holds <db>.sqlite or <db>/<db>.sqlite. `db_ids` keeps only
    the questions on these databases. `present_only` leaves out, counted, the questions that the copy lacks or whose
    database or document it lacks; otherwise each is an error that names them. `meta` has `gold_folder`,
    `condition_cols`, `ignore_order`, `gold_sha256` and `external_knowledge`.

    Raises SetupError for whatever can't be used.
    """
    if not databases.is_dir():
        raise SetupError(f"database folder {databases} does not exist: put the local databases of spider2 there")
    wanted_databases, source = set(db_ids), _Source(questions, databases)
    expected, known = question_ids(subset), published()["questions"]
    rows, skipped = _rows(questions, expected, known)
    if missing := [question_id for question_id in expected if question_id not in rows]:
        if not present_only:
            raise SetupError(
                f"{questions} lacks {len(missing)} of the {len(expected)} published questions ({_few(missing)}): "
                "download it again, or use --present-only"
            )
        skipped["not in the question file"] += len(missing)
    if unknown := sorted(wanted_databases - set(expected.values())):
        raise SetupError(f"no question of spider2 is on database {unknown[0]}: check its spelling")
    kept = {}
    for question_id, row in rows.items():
        if wanted_databases and expected[question_id] not in wanted_databases:
            skipped["on other databases"] += 1
        else:
            kept[question_id] = row
    found = {
        db_id: find_database(databases, db_id) for db_id in sorted({expected[question_id] for question_id in kept})
    }
    absent = [db_id for db_id, database in found.items() if database is None]
    if absent and not present_only:
        raise SetupError(
            f"{len(absent)} of {len(found)} spider2 databases are not in {databases} ({_few(absent)}): put "
            "<name>.sqlite there, or use --present-only"
        )
    entries = _evaluation_entries(source.gold)
    examples = []
    for question_id, row in kept.items():
        database, document = found[expected[question_id]], row.get("external_knowledge")
        if database is None:
            skipped["on absent databases"] += 1
        elif present_only and document and not (source.documents / str(document)).is_file():
            skipped["with an absent document"] += 1
        else:
            examples.append(_example(question_id, row, database, source, entries))
    if not examples:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        raise SetupError(f"no question of {questions} is left ({reasons}): check the databases asked for")
    return Loaded(examples, dict(skipped))


def _few(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _rows(
    path: Path, expected: Mapping[str, str], known: Mapping[str, str]
) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """The rows of the questions expected, by id, and the others counted by why they are left out."""
    rows: dict[str, dict[str, Any]] = {}
    skipped: Counter[str] = Counter()
    for where, row in read_records(path):
        question_id = row.get("instance_id") if isinstance(row, dict) else None
        if not isinstance(question_id, str):
            raise SetupError(f"question file {path}, {where} has no instance_id: is it spider2-lite.jsonl?")
        if question_id not in expected:
            if question_id in known:
                skipped["not in the subset"] += 1
            else:
                skipped["not local" if not question_id.startswith(_LOCAL) else "not in the published list"] += 1
            continue
        if question_id in rows:
            raise SetupError(f"question file {path} gives {question_id} more than once: remove one")
        if not isinstance(row.get("question"), str) or row.get("db") != expected[question_id]:
            raise SetupError(
                f"question file {path}, {where}: {question_id} is not the published question on "
                f"{expected[question_id]}: download the file again"
            )
        rows[question_id] = row
    return rows, skipped


def find_database(folder: Path, db_id: str) -> Database | None:
    """`<db>.sqlite` or `<db>/<db>.sqlite` in a folder, None when absent. SetupError when it isn't SQLite."""
    for place in (folder, folder / db_id):
        for suffix in SUFFIXES:
            if (path := place / f"{db_id}{suffix}").is_file():
                check_sqlite(path)
                return Database(db_id, path=path)
    return None


def _evaluation_entries(gold: Path) -> Mapping[str, dict[str, Any]]:
    """How each question's tables are compared: the lines of spider2lite_eval.jsonl by id."""
    files = sorted(gold.glob("spider2lite_eval*.jsonl"))
    if not files:
        raise SetupError(f"{gold / 'spider2lite_eval.jsonl'} does not exist: it says how gold tables are compared")
    entries: dict[str, dict[str, Any]] = {}
    for file in files:
        for where, entry in read_records(file):
            if not isinstance(entry, dict) or not isinstance(entry.get("instance_id"), str):
                raise SetupError(f"{file}, {where} has no instance_id: download it again")
            entries[entry["instance_id"]] = entry
    return entries


def _example(
    question_id: str,
    row: Mapping[str, Any],
    database: Database,
    source: _Source,
    entries: Mapping[str, dict[str, Any]],
) -> Example:
    if question_id not in entries:
        raise SetupError(f"no line of {source.gold}/spider2lite_eval.jsonl is on {question_id}: download it again")
    tables = gold_files(source.gold / "exec_result", question_id)
    document = row.get("external_knowledge")
    return Example(
        question_id=question_id,
        db_id=database.db_id,
        question=row["question"],
        gold_sql=_text(source.gold / "sql" / f"{question_id}.sql", missing=""),
        database=database,
        evidence=_text(source.documents / str(document)).strip() if document else "",
        benchmark="spider2",
        meta={
            "gold_folder": str(source.gold / "exec_result"),
            "gold_sha256": _digest(tables, entries[question_id]),
            "condition_cols": entries[question_id].get("condition_cols"),
            "ignore_order": bool(entries[question_id].get("ignore_order", False)),
            "external_knowledge": document,
        },
    )


def gold_files(folder: Path, question_id: str) -> dict[str, Path]:
    """A question's gold tables: "" is `<id>.csv`, a letter is `<id>_<letter>.csv`. SetupError when there is none."""
    names = {"": folder / f"{question_id}.csv"}
    names |= {letter: folder / f"{question_id}_{letter}.csv" for letter in LETTERS}
    found = {name: path for name, path in names.items() if path.is_file()}
    if not found:
        raise SetupError(f"no gold result {question_id}.csv or {question_id}_a.csv in {folder}: point at exec_result/")
    return found


def _digest(tables: Mapping[str, Path], entry: Mapping[str, Any]) -> str:
    """Identity of what an answer is held against: the tables, and how they are compared."""
    digest = hashlib.sha256(json.dumps([entry.get("condition_cols"), entry.get("ignore_order")]).encode())
    for name, path in tables.items():
        data = path.read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _text(path: Path, missing: str | None = None) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise SetupError(f"{path} does not exist: a question of spider2 refers to it, put it there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{path} cannot be read ({error}): download it again") from None
