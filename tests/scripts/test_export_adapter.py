"""LoRA adapters: merged as peft merges them, bit for bit, and refused before writing when they are anything else."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from shared.errors import SetupError
from tests.scripts.export_cases import (
    FULL,
    Tensors,
    base_tensors,
    export,
    read_all,
    snapshot,
    trained_tensors,
    write_base,
    write_checkpoint,
)
from tests.scripts.test_export_transformers import TEXT, VISION
from train.export import weights as weights_module

Q_PROJ, GATE = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.gate_proj"
RANK = 2


# ---- against peft


@pytest.fixture(scope="module")
def real_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the full class in bfloat16, but for its float32 tensors."""
    torch.manual_seed(0)
    base = write_base(tmp_path_factory.mktemp("adapter") / "base")
    model = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    )
    model.save_pretrained(base)
    wide = ("A_log", "linear_attn.norm.weight")
    tensors = {
        name: tensor if name.endswith(wide) else tensor.bfloat16()
        for name, tensor in load_file(base / "model.safetensors").items()
    }
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.parametrize(
    ("settings", "dtype", "chunk_values"),
    [
        ({"r": 4, "lora_alpha": 10}, torch.float32, 8 << 20),
        ({"r": 3, "lora_alpha": 7, "use_rslora": True}, torch.float32, 100),
        ({"r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2}}, torch.float32, 8 << 20),
        ({"r": 8, "lora_alpha": 16, "init_lora_weights": "gaussian"}, torch.bfloat16, 8 << 20),
    ],
    ids=["plain", "rank-stabilised", "two ranks", "bfloat16 adapter"],
)
def test_the_merge_is_pefts_bit_for_bit(
    real_base: Path,
    tmp_path: Path,
    settings: dict[str, Any],
    dtype: torch.dtype,
    chunk_values: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_VALUES", chunk_values)
    targets = ["q_proj", "o_proj", "in_proj_qkv", "out_proj", "down_proj"]
    adapted = get_peft_model(
        Qwen3_5ForCausalLM.from_pretrained(real_base, dtype=torch.float32),
        LoraConfig(target_modules=targets, lora_dropout=0.1, task_type="CAUSAL_LM", **settings),
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_((0.1 * torch.randn_like(parameter)).to(dtype))
    adapted.save_pretrained(tmp_path / "adapter")
    if dtype is torch.bfloat16:
        path = tmp_path / "adapter" / "adapter_model.safetensors"
        save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    assert export(real_base, tmp_path / "adapter", tmp_path / "out") == 0

    fresh = Qwen3_5ForCausalLM.from_pretrained(real_base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload()
    wanted = {name.replace("model.", FULL, 1): p.detach() for name, p in merged.named_parameters()}
    original, got = read_all(real_base), read_all(tmp_path / "out")
    assert got.keys() == original.keys()
    changed = set()
    for name, before in original.items():
        assert torch.equal(got[name], wanted.get(name, before).to(before.dtype)), name
        assert got[name].dtype == before.dtype, name
        if not torch.equal(got[name], before):
            changed.add(name)
    assert changed == {name for name in original if name.split(".")[-2] in targets and not name.startswith("model.v")}
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert (report["changed"], report["verified"]) == (len(changed), True)
    assert report["origins"]["trained"]["tensors"] == len(changed) == 6
    assert report["origins"]["base language"]["changed"] == 0
    assert any("merged in float32" in line for line in report["warnings"])
    assert "The base's other language-model tensors" in (tmp_path / "out" / "README.md").read_text()


# ---- by hand


def adapter_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, (rows, columns) in {Q_PROJ: (16, 8), GATE: (12, 8)}.items():
        found[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
        found[f"base_model.model.{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return found


def write_adapter(folder: Path, tensors: Tensors | None = None, **settings: object) -> Path:
    folder.mkdir()
    save_file(adapter_tensors() if tensors is None else tensors, folder / "adapter_model.safetensors")
    config: dict[str, object] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "use_rslora": False, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(("settings", "scaling"), [({}, 3.0), ({"use_rslora": True}, 6 / math.sqrt(2))])
@pytest.mark.parametrize("spelling", ["text class", "full class"])
def test_the_formula(base: Path, tmp_path: Path, spelling: str, settings: dict[str, object], scaling: float) -> None:
    tensors = adapter_tensors()
    if spelling == "full class":
        tensors = {name.replace("model.layers", f"{FULL}layers"): tensor for name, tensor in tensors.items()}
    assert export(base, write_adapter(tmp_path / "adapter", tensors, **settings), tmp_path / "out") == 0
    got, before, added = read_all(tmp_path / "out"), base_tensors(), adapter_tensors()
    for name in (Q_PROJ, GATE):
        full = f"{name.replace('model.', FULL, 1)}.weight"
        a, b = (added[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        assert torch.equal(got[full], (before[full].float() + (b @ a) * scaling).bfloat16())
        del got[full], before[full]
    assert all(torch.equal(got[name], before[name]) for name in before)


A, B = (f"base_model.model.{Q_PROJ}.lora_{half}.weight" for half in "AB")


def other_matrix(t: Tensors) -> None:
    for half in (A, B):
        t[half.replace("q_proj", "k_proj")] = t.pop(half)


def vision(t: Tensors) -> None:
    t["base_model.model.model.visual.patch_embed.proj.lora_A.weight"] = torch.ones(RANK, 3)
    t["base_model.model.model.visual.patch_embed.proj.lora_B.weight"] = torch.ones(6, RANK)


def wrong_in(t: Tensors) -> None:
    t[A] = torch.ones(RANK, 9)


def wrong_out(t: Tensors) -> None:
    t[B] = torch.ones(8, RANK)


def turned(t: Tensors) -> None:
    t[A] = t[A].T.contiguous()


def three_dimensions(t: Tensors) -> None:
    t[A] = t[A][..., None].contiguous()


def nan_in_a(t: Tensors) -> None:
    t[A][1, 1] = float("nan")


def infinite_b(t: Tensors) -> None:
    t[B][1, 1] = float("inf")


def overflow(t: Tensors) -> None:
    t[A][:], t[B][:] = 1e25, 1e25


def only_a(t: Tensors) -> None:
    del t[B]


def only_b(t: Tensors) -> None:
    del t[A]


def embedding(t: Tensors) -> None:
    t["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(RANK, 16)


def saved_module(t: Tensors) -> None:
    t["base_model.model.lm_head.weight"] = torch.ones(16, 8)


def unwrapped(t: Tensors) -> None:
    for half in (A, B):
        t[half.removeprefix("base_model.")] = t.pop(half)


def both_spellings(t: Tensors) -> None:
    for half in (A, B):
        t[half.replace("model.layers", f"{FULL}layers")] = t[half].clone()


def integers(t: Tensors) -> None:
    t[A] = t[A].to(torch.int8)


def nothing(t: Tensors) -> None:
    t.clear()


BAD_TENSORS: list[tuple[Callable[[Tensors], None], str]] = [
    (other_matrix, r"changes model\.layers\.1\.self_attn\.k_proj\.weight, which the language model of"),
    (vision, r"changes model\.visual\.patch_embed\.proj\.weight, which the language model of"),
    (wrong_in, r"by B \[16, 2\] times A \[2, 9\], but the base's has shape \[16, 8\]"),
    (wrong_out, r"by B \[8, 2\] times A \[2, 8\], but"),
    (turned, r"has 8 rows, its adapter_config.json says r = 2"),
    (three_dimensions, r"times A \[2, 8, 1\], but"),
    (nan_in_a, "lora_A.* holds NaN or infinite"),
    (infinite_b, "lora_B.* holds NaN or infinite"),
    (overflow, "too large for the base's BF16"),
    (only_a, r"a LoRA A for model\.layers\.1\.self_attn\.q_proj\.weight but no B"),
    (only_b, r"a LoRA B for model\.layers\.1\.self_attn\.q_proj\.weight but no A"),
    (embedding, "lora_embedding_A .* is no A or B"),
    (saved_module, r"lm_head\.weight of .* is no A or B"),
    (unwrapped, "is no A or B"),
    (both_spellings, "under two spellings"),
    (integers, "is I8"),
    (nothing, "holds no tensor"),
]


@pytest.mark.parametrize(("damage", "message"), BAD_TENSORS, ids=[damage.__name__ for damage, _ in BAD_TENSORS])
def test_an_adapter_that_does_not_fit_is_refused_before_writing(
    base: Path, tmp_path: Path, damage: Callable[[Tensors], None], message: str
) -> None:
    tensors = adapter_tensors()
    damage(tensors)
    refused(base, write_adapter(tmp_path / "adapter", tensors), message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "says use_dora = True, and only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save = \['lm_head'\]"),
        ({"bias": "all"}, "bias = all"),
        ({"bias": "lora_only", "lora_bias": True}, "bias = lora_only, lora_bias = True"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa"),
        ({"a_later_invention": 1}, "a_later_invention = 1"),
        ({"peft_type": "IA3"}, "peft_type = IA3"),
        ({"lora_alpha": None}, "is not the configuration of a LoRA adapter"),
        ({"r": 4}, "has 2 rows, its adapter_config.json says r = 4"),
    ],
)
def test_adapters_of_another_kind_are_refused_by_name(
    base: Path, tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    refused(base, write_adapter(tmp_path / "adapter", None, **settings), message)


def refused(base: Path, adapter: Path, message: str, *flags: str) -> None:
    before = snapshot(base.parent)
    with pytest.raises(SetupError, match=message) as caught:
        export(base, adapter, base.parent / "new" / "out", *flags)
    assert "\n" not in str(caught.value)
    assert snapshot(base.parent) == before
    assert not (base.parent / "new").exists()


def test_folders_that_hold_half_an_adapter_or_two_models_are_refused(base: Path, tmp_path: Path) -> None:
    refused(base, write_adapter(tmp_path / "a"), "use --dtype-from base", "--dtype-from", "checkpoint")
    adapter = write_adapter(tmp_path / "adapter")
    (adapter / "adapter_model.safetensors").unlink()
    refused(base, adapter, "but no adapter_model")
    refused(base, write_checkpoint(write_adapter(tmp_path / "both"), trained_tensors()), "a whole model and a LoRA")
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    refused(base, tmp_path / "a", "is not the configuration")
