"""The checker itself: it must be able to miss."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.errors import SetupError
from shared.tools.check import load_cases, run_case

QUERY = {"tool": "run_query", "args": {"sql": "SELECT name FROM item WHERE id = 1"}}


def misses(tmp_path: Path, **case: Any) -> str:
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps({"id": "x", "calls": [QUERY], "expect": ["ok"]} | case))
    return "\n".join(run_case(load_cases(path)[0]))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"expect": ["refused"]}, "expected refused, got ok"),
        ({"expect": [["refused", "timeout"]]}, "expected refused or timeout, got ok"),
        ({"rows": [[["bee"]]]}, "expected the rows"),
        ({"rows": [[["ant"], ["ant"]]]}, "expected the rows"),
        ({"contains": ["bee"]}, "lacks 'bee'"),
        ({"lacks": ["ant"]}, "contains 'ant'"),
        ({"n_calls": [2]}, "expected 2 calls"),
        ({"file": {"kind": "missing"}}, "got setup_error"),
        ({"calls": [{"turn": "nothing"}]}, "got no_call"),
        ({"calls": [{"turn": "nothing"}], "expect": ["no_call"], "n_calls": [1]}, "expected 1 calls, got 0"),
    ],
)
def test_a_wrong_expectation_is_a_miss(tmp_path: Path, case: dict[str, Any], words: str) -> None:
    assert words in misses(tmp_path, **case)


def test_numbers_keep_their_kind(tmp_path: Path) -> None:
    calls = [{"tool": "run_query", "args": {"sql": "SELECT 1.0, x'01'"}}]
    assert misses(tmp_path, calls=calls, rows=[[[1.0, {"blob": "01"}]]]) == ""
    assert "expected the rows" in misses(tmp_path, calls=calls, rows=[[[1, {"blob": "01"}]]])


def test_changes_in_the_folder_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shared.tools.executor import ToolExecutor

    original = ToolExecutor.call

    def vandal(self: ToolExecutor, call: Any) -> Any:
        assert self.database.path is not None
        with open(self.database.path, "ab") as file:
            file.write(b"x")
        self.database.path.with_name("new").touch()
        return original(self, call)

    monkeypatch.setattr(ToolExecutor, "call", vandal)
    text = misses(tmp_path)
    assert "changed case.sqlite" in text
    assert "created new" in text


def test_exceptions_leaks_and_late_answers_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from shared.tools.executor import ToolExecutor

    kept = []

    def leaky(self: ToolExecutor, call: Any) -> Any:
        kept.append(open("/dev/null"))  # noqa: SIM115
        time.sleep(1.3)
        raise KeyError("boom")

    monkeypatch.setattr(ToolExecutor, "call", leaky)
    text = misses(tmp_path, limits={"seconds": 0.2})
    kept[0].close()
    assert "raised KeyError" in text
    assert "left behind" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ("[]", "JSON object"),
        ('{"id": "x"}', "calls"),
        ('{"calls": [{}], "expect": ["ok"]}', "each call"),
        ('{"calls": [{"tool": "list_tables"}]}', "expect"),
        ('{"calls": [{"tool": "list_tables"}], "expect": ["fine"]}', "expect"),
        ('{"calls": [{"tool": "list_tables"}], "expect": ["ok", "ok"]}', "2 entries for 1"),
        ('{"calls": [{"tool": "list_tables"}], "expect": ["ok"], "colour": 1}', "unknown key 'colour'"),
        ("", "no case"),
    ],
)
def test_a_bad_case_file_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(SetupError, match=words):
        load_cases(path)


@pytest.mark.parametrize("name", ["../x.sqlite", "/tmp/x.sqlite"])
def test_a_case_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match="folder"):
        misses(tmp_path, file={"name": name})


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    good = json.dumps({"id": "good", "calls": [QUERY], "expect": ["ok"], "rows": [[["ant"]]]})
    bad = json.dumps({"id": "bad", "calls": [QUERY], "expect": ["refused"]})

    def run(*lines: str) -> tuple[int, list[str]]:
        path.write_text("\n".join(lines))
        command = [sys.executable, "-m", "shared.tools.check", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    assert run(good) == (0, ["agreed 1/1"])
    code, lines = run(good, bad)
    assert (code, lines[-1], lines[0].startswith("MISS bad: call 1: expected refused")) == (1, "agreed 1/2", True)
    code, lines = run("{")
    assert (code, len(lines), "line 1" in lines[0]) == (2, 1, True)
