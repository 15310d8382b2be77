"""Run a file of cases against the tool executor: `python -m shared.tools.check FILE.jsonl`.

One JSON object a line; each case gets a fresh folder, a fresh database and a fresh sandbox.

    id, note    the case's name, and what it tries
    setup_sql   script that builds the database (default: item(id, name, price) with three rows)
    file        {"kind": …, "name": …}: plain, wal (committed rows left in the log), locked (by another
                process), missing, empty, garbage, readonly_dir; and the file's name (it may hold folders)
    calls       a list of {"tool": …, "args": …} (as the parser would hand it on) and {"turn": "raw text"}
    limits      {"seconds": 1.0, "result_bytes": 20000}
    expect      beside calls: a class, or a list of accepted ones: ok, refused, sql_error, bad_call,
                timeout, limit, setup_error, no_call. A turn with several calls counts as its first
                result that isn't ok.
    rows        beside calls: the exact rows, as scorers get them (null = not checked); a BLOB is
                {"blob": hex}, text that is not UTF-8 {"bad_text": hex}
    contains, lacks   beside calls: text that the rendered result must, or must not, contain
    n_calls     beside calls: how many calls a turn must yield

Checked for every case besides: no file in the folder changed or appeared (the -wal and -shm of a wal
case excepted), each call back within its seconds + 1, at most 100 MB more resident memory here, no
process and no descriptor left, nothing raised, every rendered result within result_bytes and UTF-8.
Misses are printed with their reasons, then `agreed N/M`; exit status 1 on any miss.
"""

import argparse
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.cli import run_main
from shared.database import Database
from shared.errors import SetupError
from shared.sql.sandbox import BadText, Limits, Sandbox
from shared.tools.case_database import DEFAULT_NAME, DEFAULT_SQL, case_database
from shared.tools.executor import ToolExecutor, ToolLimits
from shared.tools.protocol import ToolResult, cut_text, parse_turn, problem_result, render_results, validate_call

_CLASSES = ("ok", "refused", "sql_error", "bad_call", "timeout", "limit", "setup_error", "no_call")
_KEYS = ("id", "note", "setup_sql", "file", "calls", "limits", "expect", "rows", "contains", "lacks", "n_calls")
_BESIDE = ("expect", "rows", "contains", "lacks", "n_calls")
_LATE_SECONDS = 1.0
_MEMORY_BYTES = 100 << 20
_TURNS_LEFT = 5


@dataclass(frozen=True)
class Case:
    """One line of a case file. `beside[key][i]` is what `key` says about call i (None = nothing)."""

    id: str
    calls: tuple[Mapping[str, Any], ...]
    beside: Mapping[str, tuple[Any, ...]]
    setup_sql: str = DEFAULT_SQL
    kind: str = "plain"
    name: str = DEFAULT_NAME
    seconds: float = 1.0
    result_bytes: int = 20_000


@dataclass
class _Answer:
    """What one entry of `calls` led to."""

    outcome: str
    text: str
    rows: list[tuple[Any, ...]] | None = None
    n_calls: int | None = None
    problems: list[str] = field(default_factory=list)


def load_cases(path: Path) -> list[Case]:
    """Read a case file. SetupError names the line that is not a case."""
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: U+2028 may stand in a string
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read the case file {path}: {error}") from error
    cases = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                cases.append(_parse_case(json.loads(line), number))
            except (ValueError, TypeError, AttributeError) as error:
                raise SetupError(f"{path}, line {number}: {error}") from error
    if not cases:
        raise SetupError(f"{path} holds no case; it is one JSON object a line")
    return cases


def _parse_case(raw: Any, number: int) -> Case:
    if not isinstance(raw, dict):
        raise ValueError("a case is a JSON object")
    if unknown := raw.keys() - set(_KEYS):
        raise ValueError(f"unknown key {sorted(unknown)[0]!r}; known are {', '.join(_KEYS)}")
    calls = raw.get("calls")
    if not isinstance(calls, list) or not calls:
        raise ValueError("calls must be a list of at least one call")
    if any(not isinstance(call, dict) or ("turn" in call) == ("tool" in call) for call in calls):
        raise ValueError('each call is {"tool": …, "args": …} or {"turn": …}')
    beside = {}
    for key in _BESIDE:
        value = raw.get(key)
        entries = list(value) if isinstance(value, list) else [] if value is None else [value]
        if len(entries) > len(calls):
            raise ValueError(f"{key} has {len(entries)} entries for {len(calls)} calls")
        beside[key] = tuple(entries + [None] * (len(calls) - len(entries)))
    for entry in beside["expect"]:
        accepted = [entry] if isinstance(entry, str) else entry
        if not isinstance(accepted, list) or not accepted or set(accepted) - set(_CLASSES):
            raise ValueError(f"expect must give each call one of {', '.join(_CLASSES)}, or a list of them")
    file, limits = raw.get("file") or {}, raw.get("limits") or {}
    return Case(
        id=str(raw.get("id", f"line {number}")),
        calls=tuple(calls),
        beside=beside,
        setup_sql=str(raw.get("setup_sql") or DEFAULT_SQL),
        kind=str(file.get("kind") or "plain"),
        name=str(file.get("name") or DEFAULT_NAME),
        seconds=float(limits.get("seconds", 1.0)),
        result_bytes=int(limits.get("result_bytes", 20_000)),
    )


def run_case(case: Case) -> list[str]:
    """Run one case and return what it missed; [] = agreed."""
    misses: list[str] = []
    with tempfile.TemporaryDirectory(prefix="execplan-check-") as folder:
        home = Path(folder) / "case"
        home.mkdir()
        with case_database(home, case.name, case.kind, case.setup_sql) as path:
            before, resources = _hashes(home), (_descriptors(), _children())
            with Sandbox(workers=1, directory=home) as sandbox:
                for index, call in enumerate(case.calls):
                    misses += [f"call {index + 1}: {miss}" for miss in _run_call(case, index, call, path, sandbox)]
            if (_descriptors(), _children()) != resources:
                misses.append(f"left behind: descriptors, processes {resources} -> {_descriptors(), _children()}")
            misses += _changes(before, _hashes(home), path, case.kind)
    return misses


def _run_call(case: Case, index: int, call: Mapping[str, Any], path: Path, sandbox: Sandbox) -> Iterator[str]:
    started, memory = time.monotonic(), _peak_memory()
    try:
        answer = _answer(case, call, Database("case", path=path), sandbox)
    except SetupError as error:
        answer = _Answer("setup_error", str(error))
    except Exception as error:  # the very thing that must not happen
        yield f"raised {type(error).__name__}: {error}"
        return
    seconds = time.monotonic() - started
    if seconds > case.seconds + _LATE_SECONDS:
        yield f"took {seconds:.2f} s with a limit of {case.seconds:g} s"
    if (grown := _peak_memory() - memory) >= _MEMORY_BYTES:
        yield f"resident memory grew by {grown >> 20} MB"
    yield from answer.problems
    expect, rows, contains, lacks, n_calls = (case.beside[key][index] for key in _BESIDE)
    accepted = [expect] if isinstance(expect, str) else expect
    if answer.outcome not in accepted:
        yield f"expected {' or '.join(accepted)}, got {answer.outcome}: {answer.text[:300]!r}"
    if rows is not None and not _same_rows(answer.rows, rows):
        yield f"expected the rows {rows!r}, got {answer.rows!r}"[:600]
    for text in _texts(contains):
        if text not in answer.text:
            yield f"the result lacks {text!r}: {answer.text[:300]!r}"
    for text in _texts(lacks):
        if text in answer.text:
            yield f"the result contains {text!r}: {answer.text[:300]!r}"
    if n_calls is not None and n_calls != answer.n_calls:
        yield f"expected {n_calls} calls, got {answer.n_calls}"


def _answer(case: Case, call: Mapping[str, Any], database: Database, sandbox: Sandbox) -> _Answer:
    executor = ToolExecutor(database, sandbox, ToolLimits(seconds=case.seconds, max_bytes=case.result_bytes))
    n_calls, problem, dropped = None, None, 0
    if "turn" in call:
        turn = parse_turn(call["turn"])
        calls, n_calls, problem, dropped = turn.calls, len(turn.calls), problem_result(turn), turn.dropped
    else:
        calls = (validate_call(dict(call)),)
    results = [executor.call(one) for one in calls] or ([problem] if problem is not None else [])
    if "turn" in call:
        text = render_results(results, _TURNS_LEFT, case.result_bytes, dropped=dropped)
    else:
        text = cut_text(results[0].text, case.result_bytes)
    outcomes = ["ok" if result.outcome == "submitted" else result.outcome for result in results]
    answer = _Answer(
        next((o for o in outcomes if o != "ok"), outcomes[0] if outcomes else "no_call"), text, None, n_calls
    )
    if results:
        answer.rows = _full_rows(calls[-1] if calls else None, results[-1], database, sandbox, case.seconds)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        answer.problems.append(f"the result is not UTF-8: {error}")
    else:
        if size > case.result_bytes:
            answer.problems.append(f"the result has {size} bytes, allowed are {case.result_bytes}")
    return answer


def _full_rows(
    call: Any, result: ToolResult, database: Database, sandbox: Sandbox, seconds: float
) -> list[tuple[Any, ...]]:
    """The rows of a result; those of a query as scorers get them, which is without the row limit of the tool."""
    if getattr(call, "tool", None) == "run_query" and "more rows exist" in result.text:
        return sandbox.query(database, call.args["sql"], Limits(seconds=seconds)).rows
    return list(result.rows)


def _texts(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _same_rows(rows: list[tuple[Any, ...]] | None, expected: Any) -> bool:
    plain = [[_plain(cell) for cell in row] for row in rows or []]
    return plain == expected and json.dumps(plain) == json.dumps(expected)  # the second tells 1 from 1.0


def _plain(cell: Any) -> Any:
    if isinstance(cell, BadText):
        return {"bad_text": cell.raw.hex()}
    return {"blob": cell.hex()} if isinstance(cell, bytes) else cell


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def _changes(before: dict[str, str], after: dict[str, str], database: Path, kind: str) -> list[str]:
    exempt = {f"{database.name}-wal", f"{database.name}-shm"} if kind == "wal" else set()
    names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    words = {(True, False): "removed", (False, True): "created", (True, True): "changed"}
    return [f"{words[name in before, name in after]} {name}" for name in names if Path(name).name not in exempt]


def _peak_memory() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _descriptors() -> int:
    for listing in ("/proc/self/fd", "/dev/fd"):
        if os.path.isdir(listing):
            return len(os.listdir(listing))
    return 0


def _children() -> int:
    """Child processes, zombies included (Linux; elsewhere 0)."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        count += fields[1] == str(os.getpid())
    return count


def main() -> int:
    """Command line: run every case of the files and print misses and `agreed N/M`."""
    parser = argparse.ArgumentParser(prog="python -m shared.tools.check", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    cases = [case for file in parser.parse_args().files for case in load_cases(file)]
    agreed = 0
    for case in cases:
        misses = run_case(case)
        agreed += not misses
        for miss in misses:
            print(f"MISS {case.id}: {miss}".encode("utf-8", "backslashreplace").decode(), flush=True)
    print(f"agreed {agreed}/{len(cases)}")
    return 0 if agreed == len(cases) else 1


if __name__ == "__main__":
    run_main(main)
