"""A tiny checkpoint and its export, made by hand, and the command line that holds one against the other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tokenizers import byte_tokenizer, template


def write_pair(folder: Path) -> tuple[Path, Path]:
    """folder/checkpoint in float32 and folder/export, the same in bfloat16: a Llama of a few thousand parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer(template("qwen3_5_think"))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=8192,
            initializer_range=0.2,
        )
    )
    for name, dtype in (("checkpoint", torch.float32), ("export", torch.bfloat16)):
        model.to(dtype).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "checkpoint", folder / "export"


def perturb(source: Path, target: Path, tensor: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a single-file model folder in which one tensor is changed, or left out for a None."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())
    (file,) = target.glob("*.safetensors")
    tensors = load_file(file)
    changed = {**tensors, tensor: change(tensors[tensor])}
    save_file({name: value for name, value in changed.items() if value is not None}, file, {"format": "pt"})
    return target


def arguments(checkpoint: Path, export: Path, data: Path, out: Path, *more: str) -> list[str]:
    """Short episodes on the questions of `data`."""
    where = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases"), "--out", str(out)]
    budget = ["--max-turns", "2", "--max-new-tokens", "12", "--max-tokens", "8192", "--limit", "3"]
    return ["--checkpoint", str(checkpoint), "--export", str(export), *where, *budget, *more]


def result_of(out: Path) -> dict[str, Any]:
    """What the command wrote."""
    found: dict[str, Any] = json.loads((out / "parity.json").read_text())
    return found
