"""Check downloaded benchmarks: what is there, what is missing, and where it belongs. Nothing is downloaded or changed.

    python scripts/prepare_data.py                       every benchmark below data/
    python scripts/prepare_data.py --data DIR bird spider2

A benchmark is whole when it has as many questions as were published and a database that opens for each. Exit code 1
when a benchmark that was named is not whole, or one that is there without being named.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Run as a file, Python puts this folder on the path, not the project's.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from eval.benchmarks import BENCHMARKS, SPIDER2, places
from shared.cli import ArgumentParser, run_main
from shared.data.bird import DatabaseFolder, read_records
from shared.data.spider2 import find_database, question_ids, read_spider2
from shared.data.sqale import read_sqale
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox

State = Literal["whole", "partial", "absent"]
_MARKS = {"whole": "ok     ", "partial": "PARTIAL", "absent": "absent "}
_SHOWN = 12


@dataclass(frozen=True)
class Finding:
    """The state of one benchmark, and lines on what there is and what to do."""

    name: str
    state: State
    lines: tuple[str, ...]


def inspect(name: str, data: Path, sandbox: Sandbox) -> Finding:
    """Look at one benchmark below `data`."""
    candidates = places(name, data)
    found = next(((q, d) for q, d in candidates if q.exists() and d.exists()), None)
    half = next(((q, d) for q, d in candidates if q.exists() or d.exists()), None)
    questions, databases = found or half or candidates[0]
    if found is None:
        missing = [path for path in (questions, databases) if not path.exists()]
        lines = [f"{path} is missing" for path in missing]
        return Finding(name, "partial" if half else "absent", (*lines, f"from: {BENCHMARKS[name].source}"))
    problems: list[str] = []
    lines = [f"questions {questions}, databases {databases}"]
    try:
        check = _sqale if name == "sqale" else _spider2 if name == SPIDER2 else _questions
        for line, is_problem in check(name, questions, databases, sandbox):
            lines.append(line)
            problems += [line] if is_problem else []
    except SetupError as error:
        lines.append(str(error))
        problems.append(str(error))
    if problems:
        lines += [f"from: {BENCHMARKS[name].source}", "what is there can be asked: add --present-only to eval.run"]
    return Finding(name, "partial" if problems else "whole", tuple(lines))


def _questions(name: str, questions: Path, databases: Path, sandbox: Sandbox) -> Iterator[tuple[str, bool]]:
    """BIRD's and Spider's layout: a JSON file over <db>/<db>.sqlite."""
    wanted: dict[str, int] = {}
    for where, row in read_records(questions):
        if not isinstance(row, dict) or not isinstance(row.get("db_id"), str):
            raise SetupError(f"{questions}, {where} has no db_id: is it the right file?")
        wanted[row["db_id"]] = wanted.get(row["db_id"], 0) + 1
    folder = DatabaseFolder(databases)
    yield from _counts(name, sum(wanted.values()))
    there: dict[str, Database] = {}
    broken: dict[str, str] = {}
    for db_id in sorted(wanted):
        try:
            database = folder.find(db_id)
        except SetupError as error:
            broken[db_id] = str(error)
        else:
            there |= {} if database is None else {db_id: database}
    yield from _databases(wanted, there, broken, f"{databases}/<name>/<name>.sqlite", sandbox)


def _spider2(name: str, questions: Path, databases: Path, sandbox: Sandbox) -> Iterator[tuple[str, bool]]:
    """Published ids, local databases, gold tables and documents."""
    ids = question_ids()
    there = {db_id: found for db_id in set(ids.values()) if (found := find_database(databases, db_id)) is not None}
    wanted = {db_id: list(ids.values()).count(db_id) for db_id in set(ids.values())}
    present = {row.get("instance_id") for _, row in read_records(questions) if isinstance(row, dict)} & set(ids)
    yield from _counts(name, len(present))
    yield from _databases(wanted, there, {}, f"{databases}/<name>.sqlite", sandbox)
    if there:
        loaded = read_spider2(questions, databases, present_only=True)
        with_query = sum(bool(example.gold_sql) for example in loaded.examples)
        yield (
            f"gold tables for {len(loaded.examples)} questions that can be asked, gold queries for {with_query}",
            False,
        )
        if documents := loaded.skipped.get("with an absent document"):
            yield f"documents of {documents} questions are missing in {questions.parent / 'resource/documents'}", True


def _sqale(name: str, queries: Path, schemas: Path, sandbox: Sandbox) -> Iterator[tuple[str, bool]]:
    """The test split, joined: its databases are rows in the same files."""
    yield f"test split: {read_sqale(str(queries), str(schemas), split='test').summary()}", False


def _counts(name: str, questions: int) -> Iterator[tuple[str, bool]]:
    published = BENCHMARKS[name].published
    assert published is not None
    yield f"{questions:,} of the {published[0]:,} published questions", questions < published[0]


def _databases(
    wanted: dict[str, int], there: dict[str, Database], broken: dict[str, str], place: str, sandbox: Sandbox
) -> Iterator[tuple[str, bool]]:
    """Which databases are there and open, and how many questions hang on those that aren't."""
    missing = sorted(set(wanted) - set(there) - set(broken))
    broken |= {db_id: error for db_id in sorted(there) if (error := _unreadable(there[db_id], sandbox)) is not None}
    yield f"{len(wanted) - len(missing) - len(broken)} of {len(wanted)} databases are there and open", False
    if missing:
        names = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        lost = sum(wanted[db_id] for db_id in missing)
        yield f"{len(missing)} databases are missing ({names}): put each at {place}; {lost:,} questions need them", True
    for error in broken.values():
        yield error, True


def _unreadable(database: Database, sandbox: Sandbox) -> str | None:
    try:
        tables = sandbox.schema(database)
    except (SetupError, TimeoutError) as error:
        return str(error)
    return None if tables else f"database {database.db_id} ({database.path}) has no tables: download it again"


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = ArgumentParser(prog="prepare_data.py", description="Check downloaded benchmarks; downloads nothing.")
    parser.add_argument("benchmarks", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds the benchmarks")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.benchmarks if name not in BENCHMARKS]:
        raise SetupError(f"unknown benchmark {unknown[0]}: one of {', '.join(BENCHMARKS)}")
    console = Console(highlight=False)
    with Sandbox() as sandbox:
        findings = [inspect(name, arguments.data, sandbox) for name in arguments.benchmarks or BENCHMARKS]
    for finding in findings:
        console.print(f"{_MARKS[finding.state]} {finding.name}", markup=False)
        for line in finding.lines:
            console.print(f"        {line}", markup=False, soft_wrap=True)
    bad = ("partial", "absent") if arguments.benchmarks else ("partial",)
    return 1 if any(finding.state in bad for finding in findings) else 0


if __name__ == "__main__":
    run_main(main)
