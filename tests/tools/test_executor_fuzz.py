"""Random calls and mutated turns over all databases: nothing raises, nothing changes, nothing runs unasked.

EXECPLAN_FUZZ_CALLS sets how many calls are made (default 2,000); EXECPLAN_TEST_DATA adds real databases.
"""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.database import Database, Payload
from shared.sql.sandbox import Sandbox
from shared.tools.executor import ToolExecutor, ToolLimits
from shared.tools.protocol import TOOLS, Call, parse_turn, render_results, validate_call
from tests.tools.nasty import nasty_databases

CALLS = int(os.environ.get("EXECPLAN_FUZZ_CALLS", "2000"))
LIMITS = ToolLimits(seconds=0.5, max_bytes=2000)
ATTACKS = Path(__file__).parent / "attacks"

WORDS = r"""
SELECT FROM WHERE JOIN ON AND OR NOT NULL IS IN LIKE GROUP BY ORDER LIMIT HAVING UNION ALL INTERSECT EXCEPT DISTINCT
count(*) sum( max( ( ) , ; * = < > || + - / % 1 0 -1 9e999 x'00' 'a' '' "b" `c` [d] ? :e WITH RECURSIVE AS CASE WHEN
THEN ELSE END EXPLAIN PRAGMA table_info(item) ATTACH 'x' DELETE INSERT INTO UPDATE SET DROP TABLE CREATE VACUUM BEGIN
-- /* */ VALUES (1) OVER () sqlite_master json_each('[1]') rowid
""".split()  # noqa: SIM905
WORDS += ["\x00", "\ud800", "\u00a0", "\u2028", "😀", "\n"]


def statements() -> list[str]:
    """SQL to mutate: what the attack corpus runs (short ones that end by themselves)."""
    found = []
    for file in sorted(ATTACKS.glob("*.jsonl")):
        if file.stem in ("time", "memory"):
            continue
        for line in file.read_text("utf-8").split("\n"):
            calls = json.loads(line)["calls"] if line else []
            found += [
                c["args"]["sql"]
                for c in calls
                if isinstance(c.get("args"), dict) and isinstance(c["args"].get("sql"), str)
            ]
    return [sql for sql in found if len(sql) < 300]


class Fuzz:
    """A stream of calls over one database, a function of its seed."""

    def __init__(self, seed: int, executor: ToolExecutor) -> None:
        self.dice = random.Random(seed)
        self.executor = executor
        self.names = [t.name for t in executor.schema.tables] or ["x"]
        self.columns = [c.name for t in executor.schema.tables for c in t.columns][:500] or ["y"]
        self.statements = statements()

    def mutate(self, text: str) -> str:
        letters = list(text)
        for _ in range(self.dice.randint(1, 4)):
            at = self.dice.randint(0, len(letters))
            kind = self.dice.randint(0, 3)
            if kind == 0:
                letters[at : at + self.dice.randint(0, 3)] = []
            elif kind == 1:
                letters.insert(
                    at, chr(self.dice.choice([0, 9, 10, 34, 39, 92, 96, 123, 125, 0xE9, 0x2028, 0xD800, 0x1F600]))
                )
            elif kind == 2:
                letters.insert(at, self.dice.choice(WORDS))
            else:
                letters[at:] = letters[at:][: self.dice.randint(0, 40)]
        return "".join(letters)

    def name(self, names: list[str]) -> Any:
        name: Any = self.dice.choice(names)
        kind = self.dice.randint(0, 15)
        if kind == 0:
            return self.mutate(name)
        if kind == 1:
            return self.dice.choice([name.upper(), name.lower(), f'"{name}"', f" {name}"])
        if kind == 2:
            return self.dice.choice([None, 5, True, 1.5, [name], {"a": name}, "", "sqlite_master", "x" * 5000])
        return name

    def sql(self) -> str:
        kind = self.dice.randint(0, 4)
        if kind == 0:
            return " ".join(
                self.dice.choices([*WORDS, *self.names[:20], *self.columns[:20]], k=self.dice.randint(1, 15))
            )
        if kind == 1:
            statement = self.dice.choice(self.statements)
            return self.mutate(statement) if self.dice.random() < 0.7 else statement
        table, column = self.dice.choice(self.names), self.dice.choice(self.columns)
        quoted = self.dice.choice([f'"{table}"', table, f"[{table}]", f"`{table}`"])
        tail = self.dice.choice(
            ["", f'WHERE "{column}" = 1', f'ORDER BY "{column}" DESC', f'GROUP BY "{column}"', "LIMIT 3"]
        )
        text = f"SELECT {self.dice.choice(['*', f'{chr(34)}{column}{chr(34)}', 'count(*)'])} FROM {quoted} {tail}"
        return self.mutate(text) if kind == 2 else text

    def value(self, tool: str) -> dict[str, Any]:
        args: dict[str, Any] = {}
        for param in TOOLS[tool].params:
            if param.name == "sql":
                args["sql"] = self.sql()
            elif param.type == "integer":
                args[param.name] = self.dice.choice([1, 3, 50, 10**9] * 5 + [0, -1, 10**30, "3", None, 2.5, True])
            else:
                args[param.name] = self.name(self.columns if param.name == "column_name" else self.names)
        if self.dice.random() < 0.05:
            args[self.dice.choice(["db", "sql", "limit", ""])] = self.dice.choice([None, 1, "x", []])
        name: Any = tool if self.dice.random() > 0.03 else self.dice.choice(["Run_Query", None, 7, ["run_query"], "x"])
        return {"tool": name, "args": args if self.dice.random() > 0.03 else self.dice.choice([None, [], "{}", 5])}

    def steps(self) -> Iterator[list[Any]]:
        """Checked calls, one list a turn: straight from values, or out of a (mutated) text by the parser."""
        tools = [*TOOLS, *["run_query"] * 6]
        while True:
            values = [self.value(self.dice.choice(tools)) for _ in range(self.dice.choice([1, 1, 1, 2, 4]))]
            if self.dice.random() < 0.5:
                yield [validate_call(value) for value in values]
                continue
            text = "<think>plan</think>\n" + "\n".join(
                json.dumps(v, ensure_ascii=self.dice.random() < 0.5) for v in values
            )
            if mutated := self.dice.random() < 0.5:
                text = self.mutate(text)
            turn = parse_turn(text)
            if not mutated:
                asked = [validate_call(json.loads(json.dumps(v))) for v in values]
                assert turn.calls == tuple(asked[: len(turn.calls)])
            yield list(turn.calls)

    def run(self, calls: int) -> Counter[str]:
        outcomes: Counter[str] = Counter()
        for turn in self.steps():
            results = [self.executor.call(call) for call in turn]
            text = render_results(results, 3, 4000)
            assert len(text.encode("utf-8")) <= 4000
            for call, result in zip(turn, results, strict=True):
                assert result.outcome == "submitted" or len(result.text.encode("utf-8")) <= LIMITS.max_bytes
                assert (
                    result.outcome != "bad_call"
                    or not isinstance(call, Call)
                    or call.tool not in ("run_query", "submit_sql")
                )
                outcomes[result.outcome] += 1
            if outcomes.total() >= calls:
                return outcomes
        raise AssertionError


def payloads(folder: Path) -> Iterator[Database]:
    for split in ("train", "test"):
        for line in (folder / f"data/sqale/sqale2_schemas/{split}.jsonl").read_text("utf-8").split("\n"):
            if line:
                row = json.loads(line)
                yield Database(row["schema_id"], payload=Payload(row["full_schema"], row["schema_content"]))


def test_fuzzed_calls_raise_nothing_and_change_nothing(tmp_path: Path) -> None:
    databases = list(nasty_databases(tmp_path).values())
    if folder := os.environ.get("EXECPLAN_TEST_DATA"):
        databases += [Database(file.stem, path=file) for file in sorted((Path(folder) / "data").rglob("*.sqlite"))]
        databases += payloads(Path(folder))
    before = [digest(database) for database in databases]
    share = -(-CALLS // len(databases))
    with Sandbox(workers=2) as sandbox, ThreadPoolExecutor(4) as threads:
        runs = threads.map(
            lambda i: Fuzz(i, ToolExecutor(databases[i], sandbox, LIMITS)).run(share), range(len(databases))
        )
        outcomes = sum(runs, Counter())
    assert [digest(database) for database in databases] == before
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".sqlite"] * len(list(tmp_path.iterdir()))
    assert outcomes.total() >= CALLS
    assert {"ok", "refused", "sql_error", "bad_call", "submitted"} <= outcomes.keys()
    assert outcomes["ok"] > outcomes.total() / 10
    print(dict(outcomes))


def digest(database: Database) -> str:
    return "" if database.path is None else hashlib.sha256(database.path.read_bytes()).hexdigest()
