"""A place that cannot take a command's output is refused before the work, in one line that names it."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.errors import SetupError
from shared.files import check_output

COMMANDS = [
    ("train.curriculum", ["--config", "configs/demo.yaml", "--plot"], "plot.png"),
    ("train.report", ["no-run", "--out"], "report.html"),
    ("eval.audit", ["--questions", "q.json", "--databases", "d", "--out"], "audit"),
    ("scripts.compare_checkpoints", ["a", "b", "--json"], "found.json"),
    ("scripts.fetch_smollm2", ["--out"], "model"),
]


@pytest.mark.parametrize(("module", "argv", "name"), COMMANDS, ids=[module for module, _, _ in COMMANDS])
def test_refused_before_anything_else(module: str, argv: Sequence[str], name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SetupError, match=rf"{argv[-1]} .*{name}.*: .*file is a file, not a folder"):
        importlib.import_module(module).main([*argv, str(file / "folder" / name)])


def test_what_can_be_made_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output(tmp_path / "new" / "folder" / "file", "--out")
    monkeypatch.chdir(tmp_path)
    check_output(Path("file"), "--out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no permission bits keep out.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SetupError, match=r"--out .*x: .* may not be written to"):
        check_output(tmp_path / "x", "--out")
