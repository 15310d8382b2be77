"""What export_merged writes: every tensor from where it should come, the other files as they are, all or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.errors import SetupError
from tests.scripts.export_cases import (
    FULL,
    N_ALL,
    N_TRAINED,
    base_tensors,
    export,
    export_merged,
    read_all,
    shard,
    snapshot,
    trained_tensors,
    write_checkpoint,
)
from train.export import weights as weights_module
from train.export.plan import ExportPlan, make_plan


@pytest.mark.parametrize("spelling", ["text class", "full class"])
@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("chunk_values", [5, 8 << 20])
def test_every_tensor_comes_from_where_it_should(
    base: Path, tmp_path: Path, spelling: str, layout: str, chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_VALUES", chunk_values)
    trained = trained_tensors()
    saved = trained if spelling == "text class" else {k.replace("model.", FULL, 1): v for k, v in trained.items()}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", saved)
    if layout == "sharded":
        shard(base)
        shard(checkpoint)
    out = tmp_path / "deep" / "out"
    assert export(base, checkpoint, out) == 0

    wanted, got = base_tensors(), read_all(out)
    assert set(got) == set(wanted)
    for name, original in wanted.items():
        source = trained.get(name.replace(FULL, "model."), original) if name.startswith(FULL) else original
        assert got[name].dtype == original.dtype, name
        assert torch.equal(got[name], source.to(original.dtype)), name
    report = json.loads((out / "export_report.json").read_text())
    assert (report["tensors"], report["changed"], report["verified"]) == (N_ALL, N_TRAINED, True)
    assert {origin: group["tensors"] for origin, group in report["origins"].items()} == {
        "trained": N_TRAINED,
        "base vision": 2,
        "base MTP": 2,
    }
    assert report["origins"]["trained"]["dtypes"] == {"BF16": 10, "F32": 2}
    assert report["parameters"] == sum(tensor.numel() for tensor in wanted.values())


def test_config_tokenizer_and_template_are_the_bases_bytes_and_both_stops_are_set(
    base: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export(base, checkpoint, out)
    before, after = snapshot(base), snapshot(out)
    changed = {"model.safetensors", "generation_config.json"}
    assert set(after) == set(before) | {"export_report.json", "agent.py"}
    assert after["README.md"] != before["README.md"]
    assert {name: after[name] for name in set(before) - changed - {"README.md"}} == {
        name: before[name] for name in set(before) - changed - {"README.md"}
    }
    ids = {entry["content"]: entry["id"] for entry in json.loads(before["tokenizer.json"])["added_tokens"]}
    generation = json.loads(after["generation_config.json"])
    assert generation["eos_token_id"] == [ids["<|im_end|>"], ids["<|endoftext|>"]]
    assert generation["top_k"] == 20


def test_no_training_gives_the_bases_files_bit_for_bit(base: Path, tmp_path: Path) -> None:
    shard(base)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", trained_tensors(change=0.0))
    export(base, checkpoint, tmp_path / "out")
    before, after = snapshot(base), snapshot(tmp_path / "out")
    for name in before:
        if "safetensors" in name:
            assert after[name] == before[name], name
    assert json.loads(after["export_report.json"])["changed"] == 0


def test_a_small_update_of_a_float32_tensor_survives(base: Path, tmp_path: Path) -> None:
    name = "layers.0.linear_attn.A_log"
    tensors = trained_tensors(change=0.0)
    tensors[f"model.{name}"] = tensors[f"model.{name}"] + 1e-4
    export(base, write_checkpoint(tmp_path / "checkpoint", tensors), tmp_path / "out")
    assert torch.equal(read_all(tmp_path / "out")[FULL + name], tensors[f"model.{name}"])
    rows = json.loads((tmp_path / "out" / "export_report.json").read_text())["table"]
    moved = [row for row in rows if row["changed"]]
    assert [row["name"] for row in moved] == [FULL + name]
    assert moved[0]["max_change"] == pytest.approx(1e-4, rel=1e-2)


def test_a_checkpoint_narrower_than_the_base_is_noted(base: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", trained_tensors(dtype=torch.bfloat16))
    export(base, checkpoint, tmp_path / "out")
    warnings = json.loads((tmp_path / "out" / "export_report.json").read_text())["warnings"]
    assert any(warning.startswith("2 tensors are narrower") for warning in warnings)


def test_vision_and_mtp_of_a_checkpoint_are_left_aside(base: Path, tmp_path: Path) -> None:
    tensors = trained_tensors() | {"mtp.fc.weight": torch.zeros(8, 16), "model.visual.merger.bias": torch.ones(2)}
    export(base, write_checkpoint(tmp_path / "checkpoint", tensors), tmp_path / "out")
    assert torch.equal(read_all(tmp_path / "out")["mtp.fc.weight"], base_tensors()["mtp.fc.weight"])


def test_a_tied_head_is_left_out_only_if_it_equals_the_embedding(base: Path, tmp_path: Path) -> None:
    tensors = trained_tensors()
    tied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    export(base, write_checkpoint(tmp_path / "tied", tied), tmp_path / "out")
    assert "lm_head.weight" not in read_all(tmp_path / "out")
    untied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
    with pytest.raises(SetupError, match=r"lm_head\.weight of its own"):
        export(base, write_checkpoint(tmp_path / "untied", untied), tmp_path / "other")


def test_a_wrong_total_size_of_the_base_is_put_right(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    shard(base, total_size=1)
    export(base, checkpoint, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in base_tensors().values())


def test_a_run_folder_means_its_newest_complete_checkpoint(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for step, change, whole in ((5, 0.25, True), (10, 0.5, False)):
        folder = write_checkpoint(run / f"checkpoint-step-{step}", trained_tensors(change))
        (folder / "train_state.pt").write_bytes(b"state")
        files = {path.name: path.stat().st_size + (not whole) for path in folder.iterdir()}
        (folder / "complete.json").write_text(json.dumps({"step": step, "files": files}))
    export(base, run, tmp_path / "out")
    norm = base_tensors()[f"{FULL}norm.weight"]
    assert torch.equal(read_all(tmp_path / "out")[f"{FULL}norm.weight"], (norm + 0.25).float().to(norm.dtype))
    with pytest.raises(SetupError, match="not a complete checkpoint"):
        export(base, run / "checkpoint-step-10", tmp_path / "other")


@pytest.mark.parametrize("layout", ["single", "sharded"])
@pytest.mark.parametrize("chunk_values", [5, 8 << 20])
def test_with_dtype_from_checkpoint_trained_tensors_keep_their_dtype(
    base: Path, tmp_path: Path, layout: str, chunk_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_VALUES", chunk_values)
    if layout == "sharded":
        shard(base)
    trained = trained_tensors(change=0.01, dtype=torch.float32)
    # One is as it was, in the base's dtype; one in another dtype with the base's values.
    trained["model.norm.weight"] = base_tensors()[f"{FULL}norm.weight"]
    trained["model.layers.0.mlp.gate_proj.weight"] = base_tensors()[f"{FULL}layers.0.mlp.gate_proj.weight"].float()
    out = tmp_path / "out"
    assert export(base, write_checkpoint(tmp_path / "checkpoint", trained), out, "--dtype-from", "checkpoint") == 0

    original, got = base_tensors(), read_all(out)
    assert got.keys() == original.keys()
    for name, before in original.items():
        wanted = trained[name.replace(FULL, "model.")] if name.startswith(FULL) else before
        assert got[name].dtype == wanted.dtype, name
        assert torch.equal(got[name], wanted), name
    size = sum(tensor.nbytes for tensor in got.values())
    report = json.loads((out / "export_report.json").read_text())
    assert (report["dtype_from"], report["tensor_bytes"], report["verified"]) == ("checkpoint", size, True)
    assert report["changed"] == N_TRAINED - 2
    rows = {row["name"]: row for row in report["table"]}
    assert (rows[f"{FULL}embed_tokens.weight"]["dtype"], rows[f"{FULL}embed_tokens.weight"]["base_dtype"]) == (
        "F32",
        "BF16",
    )
    assert any(line.startswith("9 tensors are written in the checkpoint's dtype") for line in report["warnings"])
    if layout == "sharded":
        assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] == size
    for file in weights_module.read_weights(out).files:
        assert all(
            tensor.offset % torch.empty(0, dtype=got[tensor.name].dtype).itemsize == 0 for tensor in file.tensors
        )


def test_values_that_the_base_could_not_hold_are_no_trouble_in_the_checkpoints_dtype(
    base: Path, tmp_path: Path
) -> None:
    trained = trained_tensors()
    trained["model.embed_tokens.weight"][0, 0] = 3.4e38
    checkpoint = write_checkpoint(tmp_path / "checkpoint", trained)
    with pytest.raises(SetupError, match="too large"):
        export(base, checkpoint, tmp_path / "out")
    assert export(base, checkpoint, tmp_path / "out", "--dtype-from", "checkpoint") == 0
    assert read_all(tmp_path / "out")[f"{FULL}embed_tokens.weight"][0, 0] == torch.tensor(3.4e38)


def test_a_base_like_checkpoint_in_its_own_dtypes_gives_the_bases_files_bit_for_bit(base: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", trained_tensors(change=0.0, dtype=None))
    export(base, checkpoint, tmp_path / "out", "--dtype-from", "checkpoint")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()


def test_a_trained_tensor_in_another_dtype_than_planned_is_noticed(
    base: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written as the base has it where the checkpoint's dtype was asked for."""

    def write_as_the_base(plan: ExportPlan, *rest: Any) -> None:
        genuine(make_plan(plan.base.folder, plan.checkpoint), *rest)

    genuine = export_merged.write_export
    monkeypatch.setattr(export_merged, "write_export", write_as_the_base)
    assert export(base, checkpoint, tmp_path / "out", "--dtype-from", "checkpoint") == 1
    assert "is BF16[16, 8], not F32[16, 8]" in capsys.readouterr().err


BY_DEFAULT = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
WHEN_ASKED = BY_DEFAULT + "{% if enable_thinking is not defined or not enable_thinking %}\n</think>\n\n{% endif %}"
NEVER = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "found", "said"),
    [
        (BY_DEFAULT, {"asked": True, "by_default": True}, None),
        (WHEN_ASKED, {"asked": True, "by_default": False}, "thinking is off unless a request asks for it"),
        (NEVER, {"asked": False, "by_default": False}, "never opens a <think> block"),
    ],
)
def test_the_report_says_whether_the_template_thinks(
    base: Path, checkpoint: Path, tmp_path: Path, template: str, found: dict[str, bool], said: str | None
) -> None:
    (base / "chat_template.jinja").write_text(template)
    export(base, checkpoint, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert report["thinking"] == found
    notes = [line for line in report["warnings"] if "think" in line]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


def test_a_template_that_fails_is_refused(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    (base / "chat_template.jinja").write_text("{{ raise_exception('no system prompts') }}")
    with pytest.raises(SetupError, match=r"fails on a system prompt and a question \(no system prompts\)"):
        export(base, checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
