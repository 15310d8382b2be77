"""The worker processes: they are reused, replaced, killed, forked around, and all gone in the end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared.database import Database
from shared.sql.sandbox import Limits, Sandbox

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
# A single function call: SQLite's progress handler never gets to run.
STUCK = "SELECT instr(printf('%.*c', 4000000, 'a'), printf('%.*c', 2000000, 'a') || 'b')"
SHORT = Limits(seconds=0.3)


def workers_of(sandbox: Sandbox) -> list[int]:
    return [worker.pid for worker in sandbox._idle]


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
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended, a process likewise
            for pid in map(int, listing.read_text().split()):
                if alive(pid) and b"shared.sql.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


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
