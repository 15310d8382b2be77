"""export_merged on a small base with the real names: linear and full layers, vision tower, MTP head, fp32 tensors."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from shared.errors import SetupError
from train.export import weights as weights_module

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("export_merged", ROOT / "scripts" / "export_merged.py")
assert _spec is not None
assert _spec.loader is not None
export_merged = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(export_merged)

Tensors = dict[str, torch.Tensor]
FULL = "model.language_model."
HIDDEN, VOCAB = 8, 16


def base_tensors() -> Tensors:
    """Random tensors under the names of a two-layer Qwen3.5 with everything beside the language model."""
    generator = torch.Generator().manual_seed(1)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    layer = {"input_layernorm.weight": (HIDDEN,), "mlp.gate_proj.weight": (12, HIDDEN)}
    linear = {"linear_attn.in_proj_qkv.weight": (24, HIDDEN), "linear_attn.conv1d.weight": (24, 1, 4)}
    full = {"self_attn.q_proj.weight": (16, HIDDEN), "self_attn.q_norm.weight": (4,)}
    tensors = {f"{FULL}embed_tokens.weight": make(VOCAB, HIDDEN), f"{FULL}norm.weight": make(HIDDEN)}
    tensors |= {f"{FULL}layers.0.{name}": make(*shape) for name, shape in (layer | linear).items()}
    tensors |= {f"{FULL}layers.1.{name}": make(*shape) for name, shape in (layer | full).items()}
    tensors[f"{FULL}layers.0.linear_attn.A_log"] = make(2, dtype=torch.float32)
    tensors[f"{FULL}layers.0.linear_attn.norm.weight"] = make(4, dtype=torch.float32)
    tensors |= {"model.visual.patch_embed.proj.weight": make(6, 3), "model.visual.blocks.0.norm1.bias": make(6)}
    tensors |= {"mtp.fc.weight": make(HIDDEN, 2 * HIDDEN), "mtp.layers.0.mlp.gate_proj.weight": make(12, HIDDEN)}
    return tensors


N_TRAINED, N_ALL = 12, 16


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def write_base(folder: Path) -> Path:
    folder.mkdir()
    save_file(base_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": 4, "top_k": 20}')
    for name in ("tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(f'{{"_": "{name}"}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}<think>\n")
    (folder / "README.md").write_text("the base's own card")
    return folder


def trained_tensors(change: float = 0.5, dtype: torch.dtype | None = torch.float32) -> Tensors:
    """The language model as a trainer saves it: text-class names, every tensor moved by `change`."""
    return {
        name.replace(FULL, "model."): (tensor + change).to(dtype or tensor.dtype)
        for name, tensor in base_tensors().items()
        if name.startswith(FULL)
    }


def write_checkpoint(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", trained_tensors())


def shard(folder: Path, total_size: int | None = None) -> None:
    """Turn a single-file model folder into one of three shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        weight_map |= dict.fromkeys(names[part::3], file)
    size = sum(tensor.nbytes for tensor in tensors.values()) if total_size is None else total_size
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def export(base: Path, checkpoint: Path, out: Path, *flags: str) -> int:
    return export_merged.main(["--base", str(base), "--checkpoint", str(checkpoint), "--out", str(out), *flags])


def read_all(folder: Path) -> Tensors:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


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
    assert set(after) == set(before) - {"README.md"} | {"export_report.json"}
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
