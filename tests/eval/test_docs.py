"""docs/evaluation.md is held to the code: every flag, verdict, benchmark and file it must name."""

import re
from pathlib import Path
from typing import get_args

from eval import records
from eval.benchmarks import BENCHMARKS
from eval.compare_text import VerdictName
from eval.gold import RULES
from eval.summary import METRICS
from shared.data.spider2 import SUBSETS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
WORDS = set(re.findall(r"`([^`\n]+)`", TEXT))


def test_everything_that_a_reader_may_meet_is_explained() -> None:
    wanted = {*RULES, *METRICS, *BENCHMARKS, *get_args(VerdictName)}
    wanted |= {records.RUN, records.EPISODES, records.TIMING, records.SUMMARY, f"--subset {SUBSETS[1]}"}
    assert wanted <= WORDS, wanted - WORDS


def test_options_named_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = "".join(
        (root / "eval" / name).read_text() for name in ("config.py", "compare.py", "check_cases.py", "parity.py")
    )
    named = {option for word in WORDS for option in re.findall(r"--[a-z][a-z-]+", word)}
    assert len(named) > 12
    assert {option for option in named if f'"{option}"' not in sources} == set()


def test_numbers_are_those_of_the_code() -> None:
    assert f"{BENCHMARKS['bird'].published[0]:,} dev questions" in TEXT  # type: ignore[index]
    assert "the 135 questions" in TEXT
    assert "10,000 resamples" in TEXT
