"""Query structure from golden cases, and that nothing raises or hangs."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.sql.structure import gold_length, join_agreement, join_structure, parses

_CASES = Path(__file__).parent / "cases"
STRUCTURES = [json.loads(line) for line in (_CASES / "structure.jsonl").read_text().splitlines()]
AGREEMENTS = [json.loads(line) for line in (_CASES / "agreement.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", STRUCTURES, ids=[case["note"] for case in STRUCTURES])
def test_structure(case: dict[str, Any]) -> None:
    structure = join_structure(case["sql"])
    assert parses(case["sql"]) is (case["tables"] is not None)
    if case["tables"] is None:
        assert structure is None
        return
    assert structure is not None
    assert list(structure.tables) == case["tables"]
    assert [list(join) for join in structure.joins] == case["joins"]


@pytest.mark.parametrize("case", AGREEMENTS, ids=[case["note"] for case in AGREEMENTS])
def test_agreement(case: dict[str, Any]) -> None:
    assert join_agreement(case["a"], case["b"]) == pytest.approx(case["agreement"])
    assert join_agreement(case["b"], case["a"]) == pytest.approx(case["agreement"])


LENGTHS = [
    ("SELECT count(*) FROM singer", 7),
    ("select  count ( * )\nfrom singer -- how many", 7),
    ("SELECT 1", 2),
    ("", 0),
    ("SELECT 'a b c d'", 2),
    ("SELECT 'unclosed", 3),
]


@pytest.mark.parametrize(("sql", "length"), LENGTHS)
def test_length(sql: str, length: int) -> None:
    assert gold_length(sql) == length


NASTY = [
    "(" * 50_000,
    "SELECT " + "(" * 3_000 + "1" + ")" * 3_000,
    "SELECT " + "NOT " * 4_000 + "1",
    "SELECT " + "-" * 15_000,
    "SELECT 1 " + "UNION SELECT 1 " * 1_200,
    "SELECT " + ",".join(["a"] * 9_000),
    "SELECT * FROM t WHERE " + " AND ".join(["a = b"] * 1_500),
    "WITH " + ", ".join(f"c{i} AS (SELECT * FROM c{i - 1})" for i in range(1, 300)) + " SELECT * FROM c299",
    "SELECT * FROM " + "(SELECT * FROM " * 500 + "t" + ")" * 500,
    "\x00\ud800'\"`[",
    "SELECT \ud800",
    "é" * 30_000,
]


@pytest.mark.parametrize("sql", NASTY, ids=range(len(NASTY)))
def test_nothing_raises_or_takes_long(sql: str) -> None:
    start = time.perf_counter()
    gold_length(sql)
    parses(sql)
    assert 0.0 <= join_agreement(sql, "SELECT * FROM t") <= 1.0
    assert time.perf_counter() - start < 10


@given(
    st.text(max_size=80)
    | st.lists(
        st.sampled_from(["SELECT", "FROM", "JOIN", "ON", "(", ")", "a", "b", ".", ",", "=", "USING", "*", "1", "'x"])
    ).map(" ".join)
)
def test_any_text_is_answered(sql: str) -> None:
    assert gold_length(sql) >= 0
    assert (join_structure(sql) is None) <= (join_agreement(sql, sql) == 0.0)
    if join_structure(sql) is not None:
        assert parses(sql)
        assert join_agreement(sql, sql) == 1.0
