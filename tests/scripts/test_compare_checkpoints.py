"""compare_checkpoints: what it calls equal, how it measures what is not, and whom it can't compare."""

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shared.errors import SetupError
from tests.scripts.export_cases import (
    FULL,
    N_ALL,
    N_TRAINED,
    ROOT,
    base_tensors,
    export,
    shard,
    trained_tensors,
    write_checkpoint,
)
from train.export import weights as weights_module
from train.export.names import kind_of, spellings, text_name

_spec = importlib.util.spec_from_file_location("compare_checkpoints", ROOT / "scripts" / "compare_checkpoints.py")
assert _spec is not None
assert _spec.loader is not None
compare_checkpoints = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(compare_checkpoints)

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def compare(a: Path, b: Path, *flags: str) -> int:
    return compare_checkpoints.main([str(a), str(b), *flags])


def compared(a: Path, b: Path, tmp_path: Path) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    """Exit code, the whole JSON, and its rows by name."""
    code = compare(a, b, "--json", str(tmp_path / "found.json"))
    found = json.loads((tmp_path / "found.json").read_text())
    return code, found, {row["name"]: row for row in found["tensors"]}


def test_a_copy_is_equal_however_it_is_sharded(base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    shard(copy)
    code, found, rows = compared(base, copy, tmp_path)
    assert (code, found["same_weights"], found["same_files"]) == (0, True, True)
    assert (len(rows), found["all"]["status"]["equal"]) == (N_ALL, N_ALL)
    assert (found["all"]["max_change"], found["all"]["relative_l2"]) == (0.0, 0.0)
    (copy / "config.json").write_text("{}")
    assert compare(base, copy) == 1
    assert compare(base, copy, "--weights-only") == 0


@pytest.mark.parametrize("chunk_values", [5, 8 << 20])
def test_differences_are_measured_as_torch_measures_them(
    tmp_path: Path, chunk_values: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_VALUES", chunk_values)
    before = trained_tensors(dtype=torch.float32)
    after = {name: tensor.clone() for name, tensor in before.items()}
    after[Q_PROJ][1, 2] += 0.5
    after["model.embed_tokens.weight"] *= 3
    a = write_checkpoint(tmp_path / "a", before)
    b = write_checkpoint(tmp_path / "b", {name.replace("model.", FULL, 1): tensor for name, tensor in after.items()})
    code, found, rows = compared(a, b, tmp_path)
    assert code == 1
    assert {name for name, row in rows.items() if row["status"] == "different"} == {
        Q_PROJ,
        "model.embed_tokens.weight",
    }
    for name, row in rows.items():
        apart = (after[name].double() - before[name].double()).abs()
        assert row["max_change"] == float(apart.max()), name
        assert row["relative_l2"] == pytest.approx(float(apart.norm() / before[name].double().norm()), rel=1e-12), name
    assert found["kinds"]["attention"]["status"] == dict.fromkeys(found["all"]["status"], 0) | {"different": 1}
    assert found["kinds"]["embedding"]["relative_l2"] == pytest.approx(2, rel=1e-6)
    capsys.readouterr()
    assert compare(a, b, "--top", "1") == 1
    said = capsys.readouterr().out
    assert "embed_tokens" in said
    assert "q_proj" not in said


def test_a_checkpoint_and_its_export_differ_by_rounding_alone(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    export(base, checkpoint, tmp_path / "out")
    for a, b, side in ((checkpoint, tmp_path / "out", "only in B"), (tmp_path / "out", checkpoint, "only in A")):
        code, found, rows = compared(a, b, tmp_path)
        assert code == 1
        status = found["all"]["status"]
        assert (status["rounded"], status["equal"], status[side]) == (N_TRAINED - 2, 2, N_ALL - N_TRAINED)
        assert rows["model.layers.0.linear_attn.A_log"]["status"] == "equal"
        assert rows["mtp.fc.weight"]["max_change"] is None
        assert found["kinds"]["vision"]["status"][side] == 2
    tensors = trained_tensors()
    tensors[Q_PROJ][0, 0] += 1
    code, found, rows = compared(write_checkpoint(tmp_path / "moved", tensors), tmp_path / "out", tmp_path)
    assert rows[Q_PROJ]["status"] == "different"


def test_what_cannot_be_subtracted_is_different_and_listed_first(tmp_path: Path) -> None:
    tensors = trained_tensors()
    nan, other, integers = (dict(tensors) for _ in range(3))
    nan[Q_PROJ] = torch.full_like(tensors[Q_PROJ], math.nan)
    other[Q_PROJ] = tensors[Q_PROJ].T.contiguous()
    integers[Q_PROJ] = torch.ones(16, 8, dtype=torch.int32)
    a = write_checkpoint(tmp_path / "a", tensors)
    for name, changed, status in (
        ("nan", nan, "different"),
        ("other", other, "other shape"),
        ("integers", integers, "different"),
    ):
        code, found, rows = compared(a, write_checkpoint(tmp_path / name, changed), tmp_path)
        assert (code, rows[Q_PROJ]["status"], rows[Q_PROJ]["max_change"]) == (1, status, None)
        assert found["all"]["status"]["equal"] == N_TRAINED - 1
    both = write_checkpoint(tmp_path / "both", nan)
    assert compare(tmp_path / "nan", both) == 0
    assert compare(tmp_path / "integers", tmp_path / "integers") == 0


def test_a_run_folder_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step in (5, 10):
        folder = write_checkpoint(run / f"checkpoint-step-{step}", trained_tensors(change=step))
        (folder / "train_state.pt").write_bytes(b"state")
        files = {path.name: path.stat().st_size + (step == 10) for path in folder.iterdir()}
        (folder / "complete.json").write_text(json.dumps({"step": step, "files": files}))
    assert compare(run, run / "checkpoint-step-5") == 0
    with pytest.raises(SetupError, match="not a complete checkpoint"):
        compare(run, run / "checkpoint-step-10")


def test_folders_that_cannot_be_compared_are_refused_in_one_line(base: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice"
    twice.mkdir()
    name = f"{FULL}norm.weight"
    norm = base_tensors()[name]
    save_file({name: norm, "model.norm.weight": norm.clone()}, twice / "model.safetensors")
    cut = Path(shutil.copytree(base, tmp_path / "cut"))
    (cut / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1])
    (tmp_path / "empty").mkdir()
    for folder, message in (
        (twice, "is the same tensor as its"),
        (cut, "not a whole safetensors file"),
        (tmp_path / "empty", "holds no"),
        (tmp_path / "nowhere", "B .* is neither a folder nor a hub id"),
    ):
        with pytest.raises(SetupError, match=message) as caught:
            compare(base, folder)
        assert "\n" not in str(caught.value)


def test_names_are_spelled_and_sorted_into_kinds() -> None:
    assert (
        spellings("model.norm.weight") == {"model.norm.weight", f"{FULL}norm.weight"} == spellings(f"{FULL}norm.weight")
    )
    for name in ("lm_head.weight", f"{FULL}language_model.norm.weight", "module.model.norm.weight"):
        assert spellings(name) == {name} == {text_name(name)}
    kinds = {name.removeprefix(FULL): kind_of(name) for name in [*base_tensors(), "lm_head.weight", "score.weight"]}
    assert kinds == {
        "embed_tokens.weight": "embedding",
        "norm.weight": "norms",
        "layers.0.input_layernorm.weight": "norms",
        "layers.0.mlp.gate_proj.weight": "MLP",
        "layers.0.linear_attn.in_proj_qkv.weight": "linear attention",
        "layers.0.linear_attn.conv1d.weight": "linear attention",
        "layers.0.linear_attn.A_log": "A_log, dt_bias",
        "layers.0.linear_attn.norm.weight": "norms",
        "layers.1.input_layernorm.weight": "norms",
        "layers.1.mlp.gate_proj.weight": "MLP",
        "layers.1.self_attn.q_proj.weight": "attention",
        "layers.1.self_attn.q_norm.weight": "norms",
        "model.visual.patch_embed.proj.weight": "vision",
        "model.visual.blocks.0.norm1.bias": "vision",
        "mtp.fc.weight": "MTP",
        "mtp.layers.0.mlp.gate_proj.weight": "MTP",
        "lm_head.weight": "head",
        "score.weight": "other",
    }
