"""A tiny model of the real architecture, trained a little and exported: the folder that vLLM loads in the tests.

The base is the demo's, with a key head for each attention head (vLLM's CPU build then has cache blocks of a useful
size), and with Qwen3.5's own chat template as TRL ships it.
"""

import importlib.util
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from tests.tokenizers import template
from train import tiny

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"KV_HEADS": 4}


def write_export(folder: Path) -> Path:
    """Make folder/base, folder/checkpoint and folder/export, and return the last one."""
    base, checkpoint, out = (folder / name for name in ("base", "checkpoint", "export"))
    with patch.multiple(tiny, **SHAPES):
        tiny.write_base(base, seed=1, layout="canonical")
    (base / "chat_template.jinja").write_text(template("qwen3_5_think"), encoding="utf-8")
    policy = Qwen3_5ForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            # Far enough from the base, and sharp enough, for a greedy token to mean something.
            parameter.add_((0.1 if parameter.ndim > 1 else 0.01) * torch.randn_like(parameter))
    policy.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(base).save_pretrained(checkpoint)
    export(checkpoint, base, out)
    return out


def export(checkpoint: Path, base: Path, out: Path) -> None:
    """What `python scripts/export_merged.py` does with these folders."""
    spec = importlib.util.spec_from_file_location("export_merged", ROOT / "scripts" / "export_merged.py")
    assert spec is not None
    assert spec.loader is not None
    export_merged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export_merged)
    assert export_merged.main(["--checkpoint", str(checkpoint), "--base", str(base), "--out", str(out)]) == 0
