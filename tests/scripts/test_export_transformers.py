"""The export between transformers' own Qwen3.5 classes: what they save goes in, what they load comes out."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from tests.scripts.export_cases import export, read_all, write_base

TEXT = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def test_a_saved_text_model_comes_back_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = write_base(tmp_path / "base")
    aux = {path.name: path.read_bytes() for path in base.iterdir() if path.suffix != ".safetensors"}
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(base)
    saved = load_file(base / "model.safetensors")
    mtp = {"mtp.fc.weight": torch.randn(32, 64), "mtp.norm.weight": torch.randn(32)}
    save_file(saved | mtp, base / "model.safetensors", metadata={"format": "pt"})
    for name, content in aux.items():
        if name != "config.json":
            (base / name).write_bytes(content)

    # Training knows the text class alone, in memory and on disk.
    policy = Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    policy.save_pretrained(tmp_path / "checkpoint")
    assert export(base, tmp_path / "checkpoint", tmp_path / "out") == 0

    tensors = read_all(tmp_path / "out")
    assert set(tensors) == set(saved) | set(mtp)
    assert not any(name.startswith("lm_head") for name in tensors)
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    n_parameters = len(dict(policy.named_parameters()))
    assert report["changed"] == report["origins"]["trained"]["tensors"] == n_parameters
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()

    ids = torch.arange(12)[None]
    for loader in (AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration):
        served, info = loader.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
        assert not info["missing_keys"], loader
        with torch.no_grad():
            assert torch.equal(served.eval()(input_ids=ids).logits, policy.eval()(input_ids=ids).logits), loader
