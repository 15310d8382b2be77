"""The attack corpus: every line of attacks/*.jsonl, through the same code as `python -m shared.tools.check`."""

from collections import Counter
from pathlib import Path

import pytest

from shared.tools.check import Case, load_cases, run_case

FILES = sorted((Path(__file__).parent / "attacks").glob("*.jsonl"))
CASES = [case for file in FILES for case in load_cases(file)]


@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_attack(case: Case) -> None:
    complaints = run_case(case)
    # The other tests of this machine can hold up a process for a second; a limit that does not hold is late every time.
    for _ in range(2):
        if not complaints or not all(" took " in complaint for complaint in complaints):
            break
        complaints = run_case(case)
    assert complaints == []


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 120
    assert [name for name, n in Counter(case.id for case in CASES).items() if n > 1] == []
