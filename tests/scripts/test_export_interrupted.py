"""An export is whole or not there: what a kill, a second export, a full disk or a bad disk leave behind."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.errors import SetupError
from tests.scripts.export_cases import ROOT, export, export_merged, shard, snapshot
from train.export import write as write_module


def test_a_written_export_that_is_wrong_is_removed(
    base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_and_flip(plan: object, aux: object, folder: Path, progress: object) -> None:
        genuine(plan, aux, folder, progress)
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        (folder / "chat_template.jinja").unlink()

    genuine = export_merged.write_export
    monkeypatch.setattr(export_merged, "write_export", write_and_flip)
    assert export(base, checkpoint, tmp_path / "out") == 1
    error = capsys.readouterr().err
    assert "does not hold the bytes of its source" in error
    assert "chat_template.jinja is missing" in error
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()


def test_what_an_interrupted_export_left_is_replaced(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray.bin").write_bytes(b"old")
    assert export(base, checkpoint, tmp_path / "out") == 0
    assert not partial.exists()
    assert not (tmp_path / "out" / "stray.bin").exists()


KILLED = """
import os, signal, sys
from tests.scripts.export_cases import export_merged
from train.export import write

def export_chunks(tensor, genuine=write.export_chunks):
    if tensor.base.path.name.startswith("model-00003"):
        os.kill(os.getpid(), signal.SIGKILL)
    return genuine(tensor)

write.export_chunks = export_chunks
export_merged.main(sys.argv[1:])
"""


def test_after_a_kill_nothing_looks_like_an_export_and_the_next_one_is_whole(
    base: Path, checkpoint: Path, tmp_path: Path
) -> None:
    shard(base)
    arguments = ["--base", str(base), "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out")]
    result = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert not (tmp_path / "out").exists()
    left = {path.name: path.stat().st_size for path in (tmp_path / ".out.partial").iterdir()}
    assert sorted(left) == [f"model-{part:05}-of-00003.safetensors" for part in (1, 2, 3)]
    assert 0 < left["model-00001-of-00003.safetensors"] == (base / "model-00001-of-00003.safetensors").stat().st_size
    assert left["model-00003-of-00003.safetensors"] < (base / "model-00003-of-00003.safetensors").stat().st_size
    assert export(base, checkpoint, tmp_path / "out") == 0
    assert not (tmp_path / ".out.partial").exists()
    export(base, checkpoint, tmp_path / "clean")
    killed, clean = snapshot(tmp_path / "out"), snapshot(tmp_path / "clean")
    assert killed.keys() == clean.keys()
    assert {name for name in clean if clean[name] != killed[name]} <= {"README.md", "export_report.json"}  # their name


def test_two_exports_of_one_name_do_not_mix(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with opened_folder(partial) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(SetupError, match="another export is writing"):
            export(base, checkpoint, tmp_path / "out")
        assert (partial / "model.safetensors").read_bytes() == b"half"
    assert export(base, checkpoint, tmp_path / "out") == 0


@contextmanager
def opened_folder(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def test_a_full_disk_is_refused_before_writing(
    base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What must be free is the export's own size, which is larger where float32 is kept."""
    export(base, checkpoint, tmp_path / "out")
    files = {name: len(content) for name, content in snapshot(tmp_path / "out").items()}
    tensors = json.loads((tmp_path / "out" / "export_report.json").read_text())["tensor_bytes"]
    late = ("model.safetensors", "README.md", "export_report.json")
    needed = tensors + sum(size for name, size in files.items() if name not in late) + write_module.SPARE_BYTES

    def with_free(free: int, name: str, *flags: str) -> int:
        monkeypatch.setattr(write_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        return export(base, checkpoint, tmp_path / name, *flags)

    assert with_free(needed, "enough") == 0
    for free, flags in ((needed - 1, ()), (needed, ("--dtype-from", "checkpoint"))):
        with pytest.raises(SetupError, match="GB free; free some or choose another disk"):
            with_free(free, "other", *flags)
        assert not (tmp_path / "other").exists()
        assert not (tmp_path / ".other.partial").exists()
