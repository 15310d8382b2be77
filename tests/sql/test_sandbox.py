"""The sandbox as its callers see it: outcomes, limits, odd files, dying workers, threads. Attacks: tests/tools."""

import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.database import Database
from shared.errors import SetupError
from shared.sql.cells import BadText, decode, encode
from shared.sql.sandbox import Limits, Sandbox
from shared.tools.case_database import DEFAULT_SQL, case_database

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
# A single function call: SQLite's progress handler never gets to run.
STUCK = "SELECT instr(printf('%.*c', 4000000, 'a'), printf('%.*c', 2000000, 'a') || 'b')"
SHORT = Limits(seconds=0.3)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as pool:
        yield pool


def make(path: Path, sql: str = DEFAULT_SQL) -> Database:
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()
    return Database(path.stem, path=path)


@pytest.fixture
def items(tmp_path: Path) -> Database:
    return make(tmp_path / "items.sqlite")


def workers_of(sandbox: Sandbox) -> list[int]:
    return [worker.pid for worker in sandbox._idle]


def test_rows_and_columns(sandbox: Sandbox, items: Database) -> None:
    result = sandbox.query(items, "SELECT id, name, price, x'00ff' AS b, 9e999 AS i FROM item ORDER BY id")
    assert (result.outcome, result.columns) == ("ok", ("id", "name", "price", "b", "i"))
    assert result.rows[0] == (1, "ant", 1.5, b"\x00\xff", float("inf"))
    assert result.rows[2][1] is None
    assert not result.truncated


def test_row_limit_says_that_there_is_more(sandbox: Sandbox, items: Database) -> None:
    for limit, n, truncated in ((2, 2, True), (3, 3, False), (4, 3, False), (0, 0, True)):
        result = sandbox.query(items, "SELECT id FROM item", Limits(max_rows=limit))
        assert (len(result.rows), result.truncated) == (n, truncated)


def test_byte_limit(sandbox: Sandbox, items: Database) -> None:
    sql = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 20000) SELECT n, 'xxxxxxxxxx' FROM r"
    assert sandbox.query(items, sql, Limits(max_bytes=100_000)).outcome == "limit"
    assert len(sandbox.query(items, sql, Limits(max_bytes=1_000_000)).rows) == 20_000


def test_a_hundred_thousand_rows_arrive_whole(sandbox: Sandbox, items: Database) -> None:
    sql = (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 100000) "
        "SELECT n, n * 0.5, 'row ' || n, NULL, CAST(n AS BLOB) FROM r"
    )
    result = sandbox.query(items, sql)
    assert result.rows == [(n, n * 0.5, f"row {n}", None, str(n).encode()) for n in range(1, 100_001)]


def test_bad_text_differs_from_every_other_text(sandbox: Sandbox, tmp_path: Path) -> None:
    city = make(
        tmp_path / "city.sqlite",
        "CREATE TABLE city(id, name); INSERT INTO city VALUES (1, 'Oslo'), (2, CAST(x'4dfc6e6368656e' AS TEXT));",
    )
    rows = sandbox.query(city, "SELECT name FROM city ORDER BY id").rows
    bad = rows[1][0]
    assert rows[0] == ("Oslo",)
    assert bad == BadText(b"M\xfcnchen")
    assert set(rows) == set(sandbox.query(city, "SELECT name FROM city").rows)
    for other in ("SELECT 'Mnchen'", "SELECT 'M\ufffdnchen'", "SELECT x'4dfc6e6368656e'"):
        assert set(sandbox.query(city, other).rows) != {(bad,)}, other
    assert json.dumps(str(bad), ensure_ascii=False).encode()


def test_names_that_are_not_utf8(sandbox: Sandbox, tmp_path: Path) -> None:
    ddl = b'CREATE VIRTUAL TABLE "f\xfc" USING fts5(a)'.hex()
    name = "CAST(x'66fc' AS TEXT)"
    rename = (
        f"UPDATE sqlite_master SET name = {name}, tbl_name = {name}, sql = CAST(x'{ddl}' AS TEXT) WHERE name = 'doc'"
    )
    script = f"CREATE VIRTUAL TABLE doc USING fts5(a); PRAGMA writable_schema = ON; {rename};"
    database = make(tmp_path / "d.sqlite", DEFAULT_SQL + script)
    started = time.monotonic()
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]
    assert BadText(b"f\xfc") in [row[0] for row in sandbox.query(database, "SELECT name FROM sqlite_master").rows]
    assert "item" in [table["name"] for table in sandbox.schema(database)]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("sql", [ENDLESS, STUCK])
def test_a_timeout_ends_the_work_and_spares_the_next_call(sandbox: Sandbox, items: Database, sql: str) -> None:
    started = time.monotonic()
    assert sandbox.query(items, sql, SHORT).outcome == "timeout"
    assert time.monotonic() - started < SHORT.seconds + 1
    assert sandbox.query(items, "SELECT 2", SHORT).rows == [(2,)]
    before = cpu_seconds(workers_of(sandbox))
    time.sleep(0.2)
    assert cpu_seconds(workers_of(sandbox)) - before < 0.1  # nothing runs on


def cpu_seconds(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_late_query_does_not_shorten_the_next(sandbox: Sandbox, items: Database) -> None:
    long = ENDLESS.replace("FROM r)", "FROM r LIMIT 400000)")
    assert sandbox.query(items, long, Limits(seconds=5)).outcome == "ok"
    time.sleep(0.1)
    assert sandbox.query(items, "SELECT 3", Limits(seconds=0.5)).rows == [(3,)]


def test_a_worker_is_used_again_after_what_went_well(items: Database) -> None:
    with Sandbox() as sandbox:
        sandbox.query(items, "SELECT 1")
        (pid,) = workers_of(sandbox)
        for sql in ("SELECT 2", "DROP TABLE item", "SELECT nope", ENDLESS):
            sandbox.query(items, sql, SHORT)
        assert workers_of(sandbox) == [pid]
        sandbox.query(items, STUCK, SHORT)
        sandbox.query(items, "SELECT 1")
        assert workers_of(sandbox) != [pid]


def test_memory_of_one_call_is_not_charged_to_the_next(items: Database) -> None:
    numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 150000) SELECT n{} FROM r"
    hungry = "SELECT n, hex(zeroblob(1000000)) AS h FROM ({}) LIMIT 500".format(
        numbers.format("").replace("150000", "500")
    )
    small = Limits(memory_bytes=32 << 20)
    with Sandbox() as sandbox:
        sandbox.query(items, "SELECT 1")
        assert len(sandbox.query(items, numbers.format(", hex(zeroblob(100))")).rows) == 150_000
        assert [sandbox.query(items, "SELECT 1", small).outcome for _ in range(3)] == ["ok"] * 3
        assert sandbox.query(items, f"SELECT * FROM ({hungry}) ORDER BY h, n DESC", small).outcome == "limit"
        assert sandbox.query(items, "SELECT 1", small).outcome == "ok"


def test_a_process_that_keeps_much_memory_knows_it() -> None:
    code = (
        "import sys; sys.path.append(sys.argv[1]); from shared.sql import limits; limits.confine()\n"
        "print(limits.has_outgrown(0)); block = bytes(200 << 20)\n"
        "print(limits.has_outgrown(0), limits.has_outgrown(1 << 30))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(Path(__file__).parents[2])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "False"]


def test_closing_leaves_no_process_and_no_descriptor(items: Database) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with Sandbox(workers=3) as sandbox:
        with ThreadPoolExecutor(8) as threads:
            outcomes = [
                r.outcome for r in threads.map(lambda sql: sandbox.query(items, sql, SHORT), [STUCK, "SELECT 1"] * 4)
            ]
        assert sorted(set(outcomes)) == ["ok", "timeout"]
        pids = workers_of(sandbox)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        sandbox.query(items, "SELECT 1")
    sandbox.close()


def test_many_threads_share_few_workers(items: Database) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with Sandbox(workers=2) as sandbox, ThreadPoolExecutor(64) as threads:
        failing = threads.map(lambda i: sandbox.query(items, f"SELECT nope{i} FROM item"), range(64 * 5))
        assert {result.outcome for result in failing} == {"sql_error"}
        right = threads.map(lambda i: sandbox.query(items, f"SELECT {i}").rows, range(200))
        assert list(right) == [[(i,)] for i in range(200)]
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_killing_workers_changes_no_result(items: Database) -> None:
    dice = random.Random(0)
    done = threading.Event()

    def ask(sandbox: Sandbox, first: int) -> list[object]:
        rows: list[object] = []
        while not done.is_set():
            n = first + len(rows)
            rows.append(sandbox.query(items, f"SELECT {n}, name FROM item WHERE id = 1").rows == [(n, "ant")])
        return rows

    with Sandbox(workers=3) as sandbox, ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, sandbox, 10**6 * i) for i in range(8)]
        killed = 0
        while killed < 25 and not any(answer.done() for answer in answers):
            for pid in dice.sample(family := children(), k=min(1, len(family))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            time.sleep(0.1)
        done.set()
        rows = [right for answer in answers for right in answer.result()]
    assert all(rows)
    assert len(rows) > 25


def children() -> list[int]:
    listings = Path("/proc/self/task").glob("*/children")
    pids = [int(pid) for listing in listings for pid in listing.read_text().split()]
    return [pid for pid in pids if alive(pid) and b"shared.sql.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_blocked_alarm_is_not_inherited(items: Database) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
    handler = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with Sandbox() as sandbox:
            sandbox.query(items, "SELECT 1")
            (pid,) = workers_of(sandbox)
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in status if line.startswith(("SigBlk", "SigIgn"))}
    assert masks["SigBlk"] == 0
    assert not masks["SigIgn"] & 1 << (signal.SIGALRM - 1)


def test_workers_end_with_their_parent(items: Database, tmp_path: Path) -> None:
    script = (
        "import sys, threading, time; from pathlib import Path; from shared.database import Database\n"
        "from shared.sql.sandbox import Limits, Sandbox\n"
        "s = Sandbox(2); d = Database('d', path=Path(sys.argv[1])); s.query(d, 'SELECT 1')\n"
        f"t = threading.Thread(target=s.query, args=(d, {STUCK!r}, Limits(seconds=0.5)), daemon=True); t.start()\n"
        "time.sleep(0.2); s2 = s.query(d, 'SELECT 1'); print(*[w.pid for w in s._idle], flush=True); time.sleep(60)\n"
    )
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(items.path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        family = [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]
        assert pids
        parent.kill()
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in family)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_sandbox_made_before_a_fork_works_after_it(items: Database) -> None:
    with Sandbox() as sandbox:
        assert sandbox.query(items, "SELECT 1").rows == [(1,)]
        pids = workers_of(sandbox)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ok = sandbox.query(items, "SELECT 2").rows == [(2,)] and workers_of(sandbox) != pids
                sandbox.close()
                code = 0 if ok else 1
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert sandbox.query(items, "SELECT 3").rows == [(3,)]
        assert workers_of(sandbox) == pids


@pytest.mark.parametrize(
    ("kind", "words"), [("missing", "does not exist"), ("empty", "0 bytes"), ("garbage", "not a SQLite")]
)
def test_unusable_files_are_set_up_errors(sandbox: Sandbox, tmp_path: Path, kind: str, words: str) -> None:
    with case_database(tmp_path, "a#b.sqlite", kind, "") as path:
        result = sandbox.query(Database("shop", path=path), "SELECT 1")
        assert result.outcome == "setup_error"
        assert words in result.message
        assert "shop" in result.message
        with pytest.raises(SetupError, match=words):
            sandbox.schema(Database("shop", path=path))
    assert sandbox.query(Database("shop", path=tmp_path), "SELECT 1").outcome == "setup_error"
    assert sandbox.query(Database("shop", path=Path("a\0b")), "SELECT 1").outcome == "setup_error"
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in sandbox.query(Database("shop", path=tmp_path / "pipe"), "SELECT 1").message


def test_a_lock_elsewhere_counts_against_the_limit(sandbox: Sandbox, tmp_path: Path) -> None:
    with case_database(tmp_path, "d.sqlite", "locked", DEFAULT_SQL) as path:
        started = time.monotonic()
        result = sandbox.query(Database("d", path=path), "SELECT count(*) FROM item", SHORT)
        assert (result.outcome, time.monotonic() - started < 1.3) == ("timeout", True)
        assert "locked" in result.message
        with pytest.raises(TimeoutError, match="locked"):
            sandbox.schema(Database("d", path=path), seconds=0.2)
    assert sandbox.query(Database("d", path=path), "SELECT count(*) FROM item").rows == [(3,)]


@pytest.mark.parametrize("kept", [("-wal", "-shm"), ("-wal",)])
def test_rows_in_the_log_are_seen_and_nothing_is_written(
    sandbox: Sandbox, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    with case_database(tmp_path, "d.sqlite", "wal", DEFAULT_SQL) as path:
        if "-shm" not in kept:
            Path(f"{path}-shm").unlink()
        names = sorted(os.listdir(tmp_path))
        log = Path(f"{path}-wal").read_bytes()
        for _ in range(2):
            assert sandbox.query(Database("d", path=path), "SELECT count(*) FROM item").rows == [(3,)]
        assert sorted(os.listdir(tmp_path)) == names
        assert Path(f"{path}-wal").read_bytes() == log


def test_a_log_database_that_was_closed_needs_no_new_files(sandbox: Sandbox, tmp_path: Path) -> None:
    database = make(tmp_path / "d.sqlite", "PRAGMA journal_mode = WAL;" + DEFAULT_SQL)
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]
    assert os.listdir(tmp_path) == ["d.sqlite"]
    writer = sqlite3.connect(tmp_path / "d.sqlite")
    writer.execute("INSERT INTO item VALUES (4, 'x', 1)")
    writer.commit()
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(4,)]
    writer.close()


def test_a_hot_journal_is_a_set_up_error(sandbox: Sandbox, tmp_path: Path) -> None:
    path = tmp_path / "d.sqlite"
    crash = (
        "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "c.executescript(sys.argv[2])\n"
        "c.execute('PRAGMA cache_size = 1'); c.execute('BEGIN'); c.execute('CREATE TABLE big(a)')\n"
        "c.execute('INSERT INTO big WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r LIMIT 9999) "
        "SELECT hex(n) FROM r'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", crash, str(path), DEFAULT_SQL], check=True)
    assert Path(f"{path}-journal").exists()
    result = sandbox.query(Database("d", path=path), "SELECT count(*) FROM item")
    assert (result.outcome, "write access" in result.message) == ("setup_error", True)


def test_damage_in_the_file_is_not_the_query_s_fault(sandbox: Sandbox, tmp_path: Path) -> None:
    fill = "CREATE TABLE big(a); WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 5000) "
    database = make(tmp_path / "d.sqlite", DEFAULT_SQL + fill + "INSERT INTO big SELECT 'row ' || n FROM r;")
    assert database.path is not None
    data = bytearray(database.path.read_bytes())
    data[4096 * 5 : 4096 * 12] = b"\xff" * (4096 * 7)
    database.path.write_bytes(data)
    assert sandbox.query(database, "SELECT count(a) FROM big").outcome == "setup_error"
    assert sandbox.query(database, "SELECT count(*) FROM item").rows == [(3,)]


def test_a_file_that_is_replaced_or_changed_is_read_anew(sandbox: Sandbox, items: Database) -> None:
    assert items.path is not None
    assert sandbox.query(items, "SELECT count(*) FROM item").rows == [(3,)]
    other = items.path.with_name("other.sqlite")
    make(other, DEFAULT_SQL + "DELETE FROM item WHERE id > 1;")
    os.replace(other, items.path)
    assert sandbox.query(items, "SELECT count(*) FROM item").rows == [(1,)]
    writer = sqlite3.connect(items.path)
    writer.execute("CREATE TABLE late(x)")
    writer.close()
    assert sandbox.query(items, "SELECT count(*) FROM late").rows == [(0,)]


def test_double_slash_paths(sandbox: Sandbox, items: Database) -> None:
    odd = Database("d", path=Path(f"/{items.path}"))
    assert sandbox.query(odd, "SELECT count(*) FROM item").rows == [(3,)]


def test_golds_may_quote_literals_doubly_and_models_are_told(sandbox: Sandbox, items: Database) -> None:
    sql = 'SELECT id FROM item WHERE name = "ant"'
    plain, told = sandbox.query(items, sql), sandbox.query(items, sql, check_names=True)
    assert plain.rows == told.rows == [(1,)]
    assert (plain.unmatched, told.unmatched) == ((), ("ant",))
    assert "'ant'" in told.notes[0]


@given(
    cells=st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary())
)
def test_cells_cross_the_border_unchanged(cells: list[object]) -> None:
    safe = [c.encode("utf-8", "ignore").decode() if isinstance(c, str) else c for c in cells]
    back = decode(encode([safe]))[0]
    assert back == safe
    assert list(map(type, back)) == list(map(type, safe))


def test_a_worker_starts_fast_and_imports_little(items: Database) -> None:
    with Sandbox() as sandbox:
        best = 9.0
        for _ in range(3):
            started = time.monotonic()
            sandbox.query(items, "SELECT 1")
            best = min(best, time.monotonic() - started)
            os.kill(workers_of(sandbox)[0], signal.SIGKILL)
            time.sleep(0.05)
    assert best < 0.5  # some 40 ms on an idle core
    probe = "import sys; sys.path.append(sys.argv[1]); import shared.sql.worker; print(*sys.modules)"
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", probe, root], capture_output=True, text=True, check=True)
    assert not {"sqlglot", "numpy", "pickle", "subprocess", "socket", "ctypes", "shared.database"} & set(
        done.stdout.split()
    )


def test_the_worker_refuses_to_write_files(tmp_path: Path) -> None:
    """The kernel's limit, apart from anything SQLite enforces."""
    code = (
        "import sys; sys.path.append(sys.argv[1]); from shared.sql import limits; limits.confine()\n"
        "try:\n    f = open(sys.argv[2], 'wb', buffering=0); f.write(b'x'); print('written')\n"
        "except OSError as e: print('refused', e.errno)"
    )
    command = [sys.executable, "-I", "-c", code, str(Path(__file__).parents[2]), str(tmp_path / "f")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith("refused")
