"""The runner benchmark plays the same episodes in every way of running. Its figures are not for tests."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_runs_and_prints_a_row_for_each_way() -> None:
    options = ["--episodes", "24", "--concurrency", "8", "--speed", "400"]
    command = [sys.executable, "scripts/bench/runner.py", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows] == ["way", "lock-step", "waiting", "request"]
    assert rows[1][3] == "1.00"
    for _, seconds, rate, _, idle, batch in rows[1:]:
        assert float(seconds) > 0
        assert float(rate) > 0
        assert 0 <= float(idle.rstrip("%")) < 100
        assert 1 <= float(batch) <= 8
