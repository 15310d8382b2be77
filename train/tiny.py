"""A tiny base checkpoint of the Qwen3.5 classes, laid out file by file as the real one: for the demo and the tests.

    python -m train.tiny --out DIR [--seed N] [--layout demo|canonical]

The folder holds config.json of `Qwen3_5ForConditionalGeneration`, weights named as in the published
checkpoints (`model.language_model.…`, `model.visual.…`, and the 15 tensors of the MTP head under `mtp.…`; embeddings
tied, so no `lm_head`), generation_config.json with both stop ids, the two preprocessor files, the tokenizer and
its chat template. The vision tower and the MTP head are random and stay so; they are there to be carried along.

Layouts: `canonical` is Qwen3.5's own, three gated-delta layers before each full-attention layer; `demo` has one of
each. Both learn on a CPU, as well as each other, the demo's in half the time: how the layers are initialised matters
more than their number, see `initialise`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from shared.cli import ArgumentParser, run_main
from shared.errors import SetupError
from train.tiny_tokenizer import (
    END_OF_TEXT,
    IMAGE_PAD,
    TURN_END,
    VIDEO_PAD,
    VISION_END,
    VISION_START,
    build_tokenizer,
)

Layout = Literal["demo", "canonical"]

LAYOUTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "demo": ("linear_attention", "full_attention"),
        "canonical": ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    }
)

HIDDEN, INTERMEDIATE = 128, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
# One wide head, not several small ones: vLLM's gated-delta kernel takes heads of 128 alone. It also learns better.
LINEAR_HEADS, LINEAR_HEAD_DIM, CONV_WIDTH = 1, 128, 4
INIT_STD = 0.08
WEIGHTS_FILE = "model.safetensors"

_PATCH, _FRAMES, _MERGE = 16, 2, 2
_PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": _MERGE,
    "patch_size": _PATCH,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "temporal_patch_size": _FRAMES,
}


def tiny_config(tokenizer: PreTrainedTokenizerFast, layout: Layout = "demo") -> Qwen3_5Config:
    """The base's config. SetupError for an unknown layout."""
    if layout not in LAYOUTS:
        raise SetupError(f"layout '{layout}' does not exist: give {' or '.join(LAYOUTS)}")
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in (END_OF_TEXT, TURN_END)}
    layer_types = list(LAYOUTS[layout])
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": LINEAR_HEAD_DIM,
        "linear_value_head_dim": LINEAR_HEAD_DIM,
        "linear_num_key_heads": LINEAR_HEADS,
        "linear_num_value_heads": LINEAR_HEADS,
        "initializer_range": INIT_STD,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "eos_token_id": ids[END_OF_TEXT],
        "dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "out_hidden_size": HIDDEN,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _FRAMES,
    }
    return Qwen3_5Config(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_PAD),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO_PAD),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(VISION_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(VISION_END),
        tie_word_embeddings=True,
        dtype="float32",
    )


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Give fresh decoder layers a start from which a model this small learns to copy within a few hundred steps.

    transformers' defaults suit big models. Here, in every layer: output projections of the residual branches x 0.05, so
    that the token's own embedding is not drowned. And in gated-delta layers:

    - the memory forgets slowly (decay of 0.2% to 2% a token; by default most of it is gone after one);
    - the convolution passes queries and values of the current token, but keys of the one before;
    - queries and keys start with the same projection, and the output projection is 0.3 x the values' transposed.

    So such a layer looks up what came after this token last time, and proposes it, from the first step on: what
    copying a name needs, and what attention layers have to be lucky to find out. All of it is trained.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.05)
    for layer in (module for module in model.modules() if isinstance(module, Qwen3_5GatedDeltaNet)):
        layer.dt_bias.fill_(-4.0)
        size = layer.key_dim
        queries, keys, values = slice(0, size), slice(size, 2 * size), slice(2 * size, 3 * size)
        layer.A_log.copy_(torch.linspace(-2.0, 0.0, layer.num_v_heads))
        layer.conv1d.weight.zero_()
        layer.conv1d.weight[:, 0, -1] = 1.0
        layer.conv1d.weight[keys, 0, -2:] = torch.tensor([1.0, 0.0])
        projection = layer.in_proj_qkv.weight
        projection[keys] = projection[queries]
        layer.out_proj.weight.copy_(0.3 * projection[values].T)


def mtp_tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The multi-token-prediction head: random, float32, under its published names."""
    layer, attention = "mtp.layers.0", "mtp.layers.0.self_attn"
    matrices = {
        "mtp.fc": (HIDDEN, 2 * HIDDEN),
        f"{layer}.mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.up_proj": (INTERMEDIATE, HIDDEN),
        f"{layer}.mlp.down_proj": (HIDDEN, INTERMEDIATE),
        f"{attention}.q_proj": (2 * HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        f"{attention}.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }
    norms = {
        "mtp.norm": HIDDEN,
        "mtp.pre_fc_norm_embedding": HIDDEN,
        "mtp.pre_fc_norm_hidden": HIDDEN,
        f"{layer}.input_layernorm": HIDDEN,
        f"{layer}.post_attention_layernorm": HIDDEN,
        f"{attention}.q_norm": HEAD_DIM,
        f"{attention}.k_norm": HEAD_DIM,
    }
    tensors = {
        f"{name}.weight": torch.randn(*shape, generator=generator) / math.sqrt(shape[1])
        for name, shape in matrices.items()
    }
    return tensors | {f"{name}.weight": 0.1 * torch.randn(size, generator=generator) for name, size in norms.items()}


def write_base(out: Path, seed: int = 0, layout: Layout = "demo") -> int:
    """Write a complete base folder; returns the number of parameters in it. The bytes depend on the arguments alone.

    Raises SetupError when `out` exists and is not empty, or cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SetupError(f"{out} exists already; remove it or give another folder")
    tokenizer = build_tokenizer()
    config = tiny_config(tokenizer, layout)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3_5ForConditionalGeneration(config)
        initialise(model.model.language_model)
    try:
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        tensors = load_file(out / WEIGHTS_FILE) | mtp_tensors(torch.Generator().manual_seed(seed))
        save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
        _write_tokenizer(tokenizer, out)
        _generation_config(tokenizer).save_pretrained(out)
        _write_json(
            out / "preprocessor_config.json", _PREPROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"}
        )
        _write_json(
            out / "video_preprocessor_config.json", _PREPROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
        )
    except (OSError, SafetensorError) as error:
        raise SetupError(f"{out} cannot be written: {error}; give another folder") from error
    return sum(tensor.numel() for tensor in tensors.values())


def _write_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the tokenizer so that AutoTokenizer loads it as it is.

    For a `qwen3_5` folder transformers 5.19 ignores `tokenizer_class` and rebuilds the tokenizer as Qwen's BPE, which
    would cut every phrase into bytes. An `auto_map` entry exempts the folder; it is never followed, since the class
    that it names is not code of the folder.
    """
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    _write_json(path, config | {"auto_map": {"AutoTokenizer": ["transformers.TokenizersBackend", None]}})


def _generation_config(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    end, end_of_text = (int(tokenizer.convert_tokens_to_ids(token)) for token in (TURN_END, END_OF_TEXT))
    return GenerationConfig(
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        eos_token_id=[end, end_of_text],
        pad_token_id=end_of_text,
    )


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Write a base folder."""
    parser = ArgumentParser(prog="python -m train.tiny", description="Write a tiny Qwen3.5 base checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layout", choices=get_args(Layout), default="demo")
    arguments = parser.parse_args(argv)
    parameters = write_base(arguments.out, arguments.seed, arguments.layout)
    print(f"{arguments.out}: {parameters:,} parameters, layers {', '.join(LAYOUTS[arguments.layout])}")


if __name__ == "__main__":
    run_main(lambda: main())
