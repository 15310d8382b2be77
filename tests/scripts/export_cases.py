"""A small base model and checkpoints for it, with the real names: linear and full layers, vision, MTP, fp32 tensors."""

import importlib.util
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

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


def write_base(folder: Path) -> Path:
    folder.mkdir()
    save_file(base_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    write_aux_files(folder)
    return folder


def write_aux_files(folder: Path) -> None:
    """Everything of a base but its weights."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}, "text_config": {}}
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n\n")
    (folder / "generation_config.json").write_text('{"eos_token_id": 4, "do_sample": true, "top_k": 20}')
    for name in ("tokenizer_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(f'{{"_": "{name}"}}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}<think>\n")
    (folder / "README.md").write_text("the base's own card")


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
