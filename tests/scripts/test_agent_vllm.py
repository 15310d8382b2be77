"""agent.py runs an exported model through vLLM in its own process, and answers as the evaluation's engine does."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm_here import ENVIRONMENT, need_vllm

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("vllm")]
ROOT = Path(__file__).resolve().parents[2]
# vLLM keeps caches in the home folder, and compiles.
KEPT = ("PATH", "HOME", "CC", "CXX", "LD_LIBRARY_PATH")
BUDGET = ["--max-turns", "2", "--max-new-tokens", "40", "--max-tokens", "4096", "--greedy"]


def episode(command: Sequence[str], cwd: Path) -> dict[str, Any]:
    """The one episode that a program prints as JSON."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | ENVIRONMENT
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, result.stderr
    record: dict[str, Any] = json.loads(lines[0])
    return record


def test_the_same_episode_with_and_without_the_project(tmp_path: Path) -> None:
    need_vllm()
    from tests.engines.tiny_export import write_export

    folder = write_export(tmp_path)
    with sqlite3.connect(tmp_path / "shop.sqlite") as connection:
        connection.execute("CREATE TABLE item (name TEXT, price REAL)")
    asked = ["--db", str(tmp_path / "shop.sqlite"), "--json", *BUDGET, "How many items are there?"]
    alone = episode([sys.executable, "-I", str(folder / "agent.py"), *asked], Path("/"))
    harness = [sys.executable, "-m", "eval.ask", "--engine", "vllm", "--model", str(folder), *asked]
    theirs = episode(harness, ROOT)
    assert [turn["n_tokens"] for turn in alone["turns"]] == [turn["n_tokens"] for turn in theirs["turns"]]
    assert [turn["text"] for turn in alone["turns"]] == [turn["text"] for turn in theirs["turns"]]
    assert (alone["answer_sql"], alone["origin"], alone["ended"]) == (
        theirs["answer_sql"], theirs["origin"], theirs["ended"],
    )  # fmt: skip
