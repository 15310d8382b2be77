"""Workers killed at random while 64 episodes run: every episode ends as it does without the kills.

EXECPLAN_KILLS sets how many kills there are (default 25).
"""

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

from shared.chat import ByteCodec
from shared.data.example import Example
from shared.engines.scripted import CannedEngine
from shared.episode import EpisodeConfig
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Sandbox
from tests.tools.nasty import nasty_databases

EPISODES, KILLS = 64, int(os.environ.get("EXECPLAN_KILLS", "25"))
BUSY = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT 60000) SELECT count(*), sum(n) FROM r"
CALLS = [
    ("list_tables", {}),
    ("run_query", {"sql": BUSY}),
    ("sample_rows", {"table_name": "item", "limit": 2}),
    ("run_query", {"sql": "SELECT name, price FROM item ORDER BY id"}),
    ("run_query", {"sql": "DELETE FROM item"}),
    ("run_query", {"sql": "SELECT nope FROM item"}),
]
TURNS = [
    "plan</think>\n" + "\n".join(json.dumps({"tool": tool, "args": args}) for tool, args in [*CALLS, CALLS[1]]),
    "again</think>\n" + "\n".join(json.dumps({"tool": tool, "args": args}) for tool, args in reversed(CALLS)),
    'done</think>\n{"tool": "submit_sql", "args": {"sql": "SELECT name FROM item"}}',
]


def run(tasks: list[Task], sandbox: Sandbox) -> dict[int, Any]:
    codec = ByteCodec()
    config = EpisodeConfig(max_tokens=60_000)
    records = run_episodes(
        tasks, CannedEngine(codec, TURNS), codec, sandbox, config, concurrency=EPISODES, tool_threads=4
    )
    return {index: without_times(record.to_json()) for index, record in records}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if "seconds" not in key}
    if isinstance(value, list):
        return [without_times(part) for part in value]
    return re.sub(r"\d+(\.\d+)? s\b", "", value) if isinstance(value, str) else value


def workers() -> list[int]:
    found = []
    for listing in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended, a process likewise
            for pid in listing.read_text().split():
                if b"shared.sql.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
    return found


def test_kills_change_no_episode(tmp_path: Path) -> None:
    database = nasty_databases(tmp_path)["kinds"]
    tasks = [Task(Example(f"q{i}", "kinds", "?", "SELECT 1", database), seed=i) for i in range(EPISODES)]
    with Sandbox(workers=2) as sandbox:
        calm = run(tasks, sandbox)
    assert {record["origin"] for record in calm.values()} == {"submitted"}
    killed, done = 0, threading.Event()

    def kill() -> None:
        nonlocal killed
        dice = random.Random(1)
        while killed < KILLS and not done.is_set():  # not for ever: on a busy machine no worker would live to start
            if family := workers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(family), signal.SIGKILL)
                    killed += 1
            time.sleep(dice.uniform(0.05, 0.35))

    with Sandbox(workers=2) as sandbox:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            while killed < KILLS and killer.is_alive():
                assert run(tasks, sandbox) == calm
        finally:
            done.set()
            killer.join()
    assert killed == KILLS
    assert workers() == []
