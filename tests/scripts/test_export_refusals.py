"""What export_merged refuses, before anything is written: checkpoints, bases and output folders that don't fit."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from shared.errors import SetupError
from tests.scripts.export_cases import (
    FULL,
    ROOT,
    Tensors,
    export,
    shard,
    snapshot,
    trained_tensors,
    write_checkpoint,
)

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def drop(t: Tensors) -> None:
    del t[Q_PROJ]


def rename(t: Tensors) -> None:
    t[Q_PROJ.replace("q_proj", "query")] = t.pop(Q_PROJ)


def prefix(t: Tensors) -> None:
    t[f"module.{Q_PROJ}"] = t.pop(Q_PROJ)


def double_prefix(t: Tensors) -> None:
    t[Q_PROJ.replace("model.", "model.language_model.language_model.")] = t.pop(Q_PROJ)


def reshape(t: Tensors) -> None:
    t[Q_PROJ] = t[Q_PROJ].T.contiguous()


def poison(t: Tensors) -> None:
    t[Q_PROJ][3, 2] = float("nan")


def all_nan(t: Tensors) -> None:
    t[Q_PROJ].fill_(float("nan"))


def overflow(t: Tensors) -> None:
    t[Q_PROJ][0, 0] = 3.4e38


def integers(t: Tensors) -> None:
    t[Q_PROJ] = t[Q_PROJ].to(torch.int8)


def extra(t: Tensors) -> None:
    t["model.layers.1.adapter.weight"] = torch.ones(2)


def both_spellings(t: Tensors) -> None:
    t[Q_PROJ.replace("model.", FULL, 1)] = t[Q_PROJ].clone()


BAD_TENSORS: list[tuple[Callable[[Tensors], None], str]] = [
    (drop, r"1 missing \(model\.language_model\.layers\.1\.self_attn\.q_proj\.weight\)"),
    (rename, r"1 missing .* 1 unknown \(model\.layers\.1\.self_attn\.query\.weight\)"),
    (prefix, r"1 unknown \(module\."),
    (double_prefix, r"1 unknown \(model\.language_model\.language_model"),
    (reshape, r"has shape \[8, 16\], the base's \[16, 8\]"),
    (poison, "holds NaN or infinite"),
    (all_nan, "holds NaN or infinite"),
    (overflow, "too large for the base's BF16"),
    (integers, "is I8"),
    (extra, r"1 unknown \(model\.layers\.1\.adapter"),
    (both_spellings, "holds each tensor once"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_TENSORS, ids=[damage.__name__ for damage, _ in BAD_TENSORS])
def test_a_checkpoint_that_does_not_fit_is_refused_before_writing(
    base: Path, tmp_path: Path, damage: Callable[[Tensors], None], message: str
) -> None:
    tensors = trained_tensors()
    damage(tensors)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tensors)
    before = snapshot(tmp_path)
    with pytest.raises(SetupError, match=message) as caught:
        export(base, checkpoint, tmp_path / "new" / "out")
    assert "\n" not in str(caught.value)
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", ["base", "in base", "checkpoint", "not empty", "file"])
def test_an_output_folder_in_use_is_refused(base: Path, checkpoint: Path, tmp_path: Path, where: str) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    out = {
        "base": base.parent / "checkpoint" / ".." / "base",
        "in base": base / "export",
        "checkpoint": checkpoint,
        "not empty": used,
        "file": used / "notes.txt",
    }[where]
    before = snapshot(tmp_path)
    with pytest.raises(SetupError, match="--out"):
        export(base, checkpoint, out)
    assert snapshot(tmp_path) == before


def test_an_empty_output_folder_is_used(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(base, checkpoint, tmp_path / "out", "--no-verify") == 0
    assert json.loads((tmp_path / "out" / "export_report.json").read_text())["verified"] is False


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "video_preprocessor_config.json"],
)
def test_a_base_without_a_needed_file_is_refused(base: Path, checkpoint: Path, tmp_path: Path, name: str) -> None:
    (base / name).unlink()
    with pytest.raises(SetupError, match=name):
        export(base, checkpoint, tmp_path / "out")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_a_checkpoint_of_another_template_or_tokenizer_is_refused(
    base: Path, checkpoint: Path, tmp_path: Path, name: str
) -> None:
    shutil.copy(base / name, checkpoint)
    assert export(base, checkpoint, tmp_path / "same") == 0
    if name == "tokenizer.json":
        Tokenizer(models.WordLevel({"other": 0}, unk_token="other")).save(str(checkpoint / name))
    else:
        (checkpoint / name).write_text("another")
    with pytest.raises(SetupError, match="base that the run was started from"):
        export(base, checkpoint, tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "shard missing", "shard extra", "no index", "none"])
def test_damaged_weight_files_are_refused(base: Path, checkpoint: Path, tmp_path: Path, damage: str) -> None:
    file = checkpoint / "model.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "header":
        file.write_bytes(b"\xff" * 7 + file.read_bytes())
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "none":
        file.unlink()
    else:
        shard(checkpoint)
        first, *_ = sorted(checkpoint.glob("*.safetensors"))
        if damage == "shard missing":
            first.unlink()
        elif damage == "shard extra":
            shutil.copy(first, checkpoint / "model-extra.safetensors")
        else:
            (checkpoint / "model.safetensors.index.json").unlink()
    with pytest.raises(SetupError):
        export(base, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_none_is_one_line_and_exit_code_2(base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/export_merged.py", "--base", str(base), "--checkpoint", "nowhere"]
    result = subprocess.run([*command, "--out", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: --checkpoint nowhere is neither a folder nor a hub id")
