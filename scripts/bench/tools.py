"""How fast the tools are: against plain sqlite3 without any protection, and against LangChain's SQL toolkit.

    python scripts/bench/tools.py DB.sqlite [DB.sqlite …] [--langchain PYTHON] [--payload SCHEMAS.jsonl]

Side (b) needs an interpreter with langchain-community, best in an environment of its own:

    python -m venv /tmp/lc && /tmp/lc/bin/pip install langchain-community
    python scripts/bench/tools.py … --langchain /tmp/lc/bin/python

--payload: a JSONL file of SQaLe schema rows (full_schema, schema_content); its database with the most
tables is built here and by the sqale package.

All sides run in short rounds that alternate, on one core (every process is pinned to it), each on an open
connection where it has one. The figure is CPU time a call, of all processes involved: what one core can do,
whatever else the machine has to do. Of the rounds the fastest counts, as `timeit` advises. Query texts differ
from call to call, as a model's do, so that no side answers from a cache of compiled statements. Prints Markdown.
"""

import argparse
import json
import os
import platform
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from shared.cli import run_main
from shared.database import Database, Payload
from shared.errors import SetupError
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.executor import ToolExecutor, ToolLimits
from shared.tools.protocol import Call
from shared.tools.schema import show

Step = Callable[[int], object]
ROUNDS = 21
ROUND_SECONDS = 0.03

# Runs in the other interpreter: reads "tool<TAB>n<TAB>argument" lines, answers with seconds for n calls.
LANGCHAIN_SIDE = """
import sys, time, warnings
warnings.simplefilter("ignore")
from langchain_community.utilities import SQLDatabase
from langchain_community.tools.sql_database.tool import (
    InfoSQLDatabaseTool, ListSQLDatabaseTool, QuerySQLDatabaseTool)
db = SQLDatabase.from_uri("sqlite:///" + sys.argv[1])
tools = {"list": ListSQLDatabaseTool(db=db), "info": InfoSQLDatabaseTool(db=db), "query": QuerySQLDatabaseTool(db=db)}
print("ready", flush=True)
for line in sys.stdin:
    name, n, argument = line.rstrip("\\n").split("\\t")
    tool, started = tools[name], time.process_time()
    for i in range(int(n)):
        tool.invoke(argument + f" /* {i} */" if name == "query" else argument)
    print(time.process_time() - started, flush=True)
"""


class LangChain:
    """The toolkit in its own interpreter, over one database."""

    def __init__(self, python: str, database: Path) -> None:
        command = [python, "-c", LANGCHAIN_SIDE, str(database)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SetupError(f"{python} cannot import langchain_community: {python} -m pip install langchain-community")

    def seconds(self, tool: str, n: int, argument: str) -> float:
        """Time for n calls, measured over there."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{tool}\t{n}\t{argument}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def cpu_seconds() -> float:
    """CPU time of this process and of its SQL workers so far (Linux)."""
    total = time.process_time()
    for listing in Path("/proc/self/task").glob("*/children"):
        for pid in listing.read_text().split():
            if b"shared.sql.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return total


def run_for(step: Step) -> Callable[[int], float]:
    """A function that takes n and returns the CPU seconds that n calls of `step` take."""

    def seconds(n: int) -> float:
        started = cpu_seconds()
        for i in range(n):
            step(i)
        return cpu_seconds() - started

    return seconds


def alternate(sides: dict[str, Callable[[int], float]]) -> dict[str, float]:
    """Microseconds a call in the fastest round of each side; the rounds take turns."""
    counts = {}
    for name, seconds in sides.items():
        seconds(3)
        counts[name] = max(3, int(ROUND_SECONDS / max(seconds(5) / 5, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, seconds in sides.items():
            times[name].append(seconds(counts[name]) / counts[name] * 1e6)
    return {name: min(values) for name, values in times.items()}


def largest_table(connection: sqlite3.Connection) -> str:
    """The table with the most rows."""
    names = [
        row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")
    ]
    names = [name for name in names if not name.startswith("sqlite_")]
    counts: dict[str, int] = {
        name: int(connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0]) for name in names
    }
    return max(counts, key=counts.__getitem__)


def millisecond_query(connection: sqlite3.Connection) -> str:
    """A query that takes about 1 ms on this machine."""
    n = 1000
    while True:
        sql = (
            f"WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT {n}) SELECT count(*), sum(n) FROM r"
        )
        best = min(run_for(lambda _: connection.execute(sql).fetchall())(1) for _ in range(7))  # noqa: B023
        if best > 0.0009:
            return sql
        n = int(n * min(2.0, 0.00105 / best) + 1)


def bench_database(path: Path, sandbox: Sandbox, langchain: str | None) -> Iterable[str]:
    """The table rows of one database."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    plain = sqlite3.connect(uri, uri=True)
    table = largest_table(plain)
    column = plain.execute(f'SELECT * FROM "{table}" LIMIT 0').description[-1][0]
    tables = plain.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    rows = plain.execute(f'SELECT count(*) FROM "{table}"').fetchone()[0]
    executor = ToolExecutor(Database(path.stem, path=path), sandbox, ToolLimits(seconds=30))
    other = LangChain(langchain, path) if langchain else None
    yield f"| **{path.stem}** ({tables} tables; {table}: {rows:,} rows) | | | | | |"

    def sql(text: str) -> Step:
        return lambda i: plain.execute(f"{text} /* {i} */").fetchall()

    def tool(name: str, **args: object) -> Step:
        def step(i: int) -> None:
            given = {"sql": f"{args['sql']} /* {i} */"} if "sql" in args else args
            result = executor.call(Call(name, given))
            if result.outcome != "ok":
                raise SetupError(f"{name} on {path}: {result.text}")

        return step

    slow, quick = millisecond_query(plain), f"SELECT * FROM {show(table)} LIMIT 6"
    listing = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
    cases: list[tuple[str, Step, Step, tuple[str, str] | None]] = [
        ("list_tables", sql(listing), tool("list_tables"), ("list", "")),
        (
            "describe_table",
            sql(f"SELECT sql FROM sqlite_master WHERE name = '{table}'"),
            tool("describe_table", table_name=table),
            ("info", table),
        ),
        (
            "foreign_keys",
            sql(f'PRAGMA foreign_key_list("{table}")'),
            tool("foreign_keys", table_name=table),
            ("info", table),
        ),
        (
            "sample_rows",
            sql(f'SELECT * FROM "{table}" LIMIT 6'),
            tool("sample_rows", table_name=table, limit=5),
            ("query", f'SELECT * FROM "{table}" LIMIT 5'),
        ),
        (
            "distinct_values",
            sql(f'SELECT DISTINCT "{column}" FROM "{table}" LIMIT 21'),
            tool("distinct_values", table_name=table, column_name=column, limit=20),
            ("query", f'SELECT DISTINCT "{column}" FROM "{table}" LIMIT 20'),
        ),
        ("run_query, 6 rows", sql(quick), tool("run_query", sql=quick), ("query", quick)),
        ("run_query, 1 ms", sql(slow), tool("run_query", sql=slow), ("query", slow)),
    ]
    for name, floor, ours, theirs in cases:
        sides = {"floor": run_for(floor), "ours": run_for(ours)}
        if other is not None and theirs is not None:
            call = theirs
            sides["langchain"] = lambda n, call=call: other.seconds(call[0], n, call[1])  # type: ignore[misc]
        took = alternate(sides)
        mine, least, them = took["ours"], took["floor"], took.get("langchain")
        cells = [name, f"{1e6 / mine:,.0f}", f"{mine:,.1f}", f"{least:,.1f}", f"{mine - least:+,.0f}"]
        cells += ["-", "-"] if them is None else [f"{them:,.0f}", f"{them / mine:.1f}x"]
        yield f"| {' | '.join(cells)} |"
    if other is not None:
        other.close()


def bench_pool(path: Path) -> str:
    """Calls per second with one worker and with two, 8 threads asking queries of some 5 ms, on all cores."""
    plain = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    sql = millisecond_query(plain).replace("LIMIT ", "LIMIT 5*")
    database = Database(path.stem, path=path)
    rates: dict[int, list[float]] = {1: [], 2: []}
    for workers in (1, 2) * 5:
        with Sandbox(workers) as sandbox, ThreadPoolExecutor(8) as threads:
            ask: Callable[[int], object] = lambda i, s=sandbox: s.query(database, f"{sql} /* {i} */", Limits())  # type: ignore[misc]  # noqa: E731
            list(threads.map(ask, range(40)))
            started = time.perf_counter()
            list(threads.map(ask, range(200)))
            rates[workers].append(200 / (time.perf_counter() - started))
    one, two = max(rates[1]), max(rates[2])
    return f"2 workers make {two:,.0f} calls/s, one worker {one:,.0f}: {two / one:.2f}x (queries of 5 ms, all cores)."


def bench_payload(path: Path) -> str:
    """Build the payload database with the most tables: in a worker (sent, built, first answer), here, and by sqale."""
    import sqale

    from shared.sql.payload import build

    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    row = max(rows, key=lambda row: row["full_schema"].upper().count("CREATE TABLE"))
    texts = row["full_schema"], row["schema_content"]
    tables = sqale.build_database(row).execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]

    def through_worker(i: int) -> None:
        database = Database("p", payload=Payload(f"{texts[0]}\n-- {time.perf_counter_ns()}", texts[1]))
        if sandbox.query(database, "SELECT 1").outcome != "ok":
            raise SetupError(f"{path}: {row['schema_id']} cannot be built")

    with Sandbox() as sandbox:
        took = alternate(
            {
                "sqale": run_for(lambda _: sqale.build_database(row).close()),
                "ours": run_for(lambda _: build(*texts, lambda: False)),
                "worker": run_for(through_worker),
            }
        )
    ours, package, worker = (f"{took[side] / 1e3:.0f} ms" for side in ("ours", "sqale", "worker"))
    return (
        f"{row['schema_id']} ({tables} tables) built from its payload: {ours}; by the sqale package: {package}; "
        f"sent to a worker, built there and the first query answered: {worker}."
    )


def bench_start(path: Path) -> str:
    """Time from nothing to the first answer."""
    times = []
    for _ in range(15):
        started = time.perf_counter()
        with Sandbox() as sandbox:
            sandbox.query(Database("d", path=path), "SELECT 1")
            times.append(time.perf_counter() - started)
    return f"A worker's start, up to its first answer: {min(times) * 1e3:.0f} ms."


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("databases", nargs="+", type=Path, metavar="DB.sqlite")
    parser.add_argument("--langchain", metavar="PYTHON", help="an interpreter that has langchain-community")
    parser.add_argument("--payload", type=Path, metavar="SCHEMAS.jsonl", help="SQaLe schema rows")
    args = parser.parse_args()
    for path in [*args.databases, *([args.payload] if args.payload else [])]:
        if not path.is_file():
            raise SetupError(f"{path} does not exist")
    pool = bench_pool(args.databases[0])
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    versions = f"Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {platform.machine()}"
    print(f"{versions}; CPU time on one core.\n")
    print("| tool | calls/s | µs a call | floor, µs | over the floor | LangChain, µs | we are faster by |")
    print("|---|---|---|---|---|---|---|")
    with Sandbox() as sandbox:
        for path in args.databases:
            for line in bench_database(path, sandbox, args.langchain):
                print(line, flush=True)
    if not args.langchain:
        print("\nLangChain's side was skipped: no --langchain interpreter was given (see --help).")
    print(f"\n{pool}\n\n{bench_start(args.databases[0])}")
    print(
        f"\n{bench_payload(args.payload)}"
        if args.payload
        else "\nThe payload build was skipped: no --payload was given."
    )
    return 0


if __name__ == "__main__":
    run_main(main)
