"""The attack corpus: every line of attacks/*.jsonl, through the same code as `python -m shared.tools.check`."""

from collections import Counter
from pathlib import Path

import pytest

from shared.tools.check import Case, load_cases, run_case

FILES = sorted((Path(__file__).parent / "attacks").glob("*.jsonl"))
CASES = [case for file in FILES for case in load_cases(file)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_attack(case: Case) -> None:
    assert run_case(case) == []


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 120
    assert [name for name, n in Counter(case.id for case in CASES).items() if n > 1] == []
