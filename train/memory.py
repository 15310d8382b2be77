"""What a run will need of each rank's memory: sizes from the model's config alone, nothing is loaded.

Weights, gradients, optimizer and caches are exact; activations are measured layer by layer (train/activations.py).
All are bytes on one rank's device.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from train.activations import layer_memory
from train.config import LoraConfig, TrainConfig

_BYTES = {"float32": 4, "bfloat16": 2}
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """A decoder's size: parameter counts, and the widths (values a token) that caches and activations follow from.

    `matrices` counts the two-dimensional weights inside the layers (what Muon takes). `linears` has, by the last part
    of the name, inputs plus outputs of all linear layers of that name (what a LoRA of rank 1 has). `layers` are the
    kinds of the layers in order; `cache_width` the keys and values of all attention layers; `state_values` the
    recurrent and convolution states of all linear layers, an episode. `config` is what it was made from.
    """

    parameters: int
    matrices: int
    linears: Mapping[str, int]
    hidden: int
    vocabulary: int
    layers: tuple[str, ...]
    cache_width: int
    state_values: int
    config: Any = field(repr=False, compare=False)


def model_shape(config: Any) -> Shape:
    """The shape of a transformers config's language model; built on the meta device, which takes no memory."""
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    embedding = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    embedding.add(id(model.get_output_embeddings().weight))
    parameters = list(model.parameters())
    linears: Counter[str] = Counter()
    for name, module in model.get_decoder().named_modules():
        if isinstance(module, nn.Linear):
            linears[name.rpartition(".")[2]] += module.in_features + module.out_features
    hidden = int(text.hidden_size)
    heads, kv_heads = int(text.num_attention_heads), int(text.num_key_value_heads)
    head_dim = int(getattr(text, "head_dim", None) or hidden // heads)
    layers = list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)
    states = 0
    if "linear_attention" in layers:
        keys = int(text.linear_num_key_heads * text.linear_key_head_dim)
        values = int(text.linear_num_value_heads * text.linear_value_head_dim)
        states = int(
            values * text.linear_key_head_dim + (2 * keys + values) * getattr(text, "linear_conv_kernel_dim", 4)
        )
    n_linear = layers.count("linear_attention")
    return Shape(
        parameters=sum(p.numel() for p in parameters),
        matrices=sum(p.numel() for p in parameters if p.ndim == 2 and id(p) not in embedding),
        linears=dict(linears),
        hidden=hidden,
        vocabulary=int(text.vocab_size),
        layers=tuple(layers),
        cache_width=(len(layers) - n_linear) * 2 * kv_heads * head_dim,
        state_values=n_linear * states,
        config=text,
    )


@dataclass(frozen=True)
class Item:
    """One line of the plan: bytes on a rank's device, how they come about, and the phases that hold them."""

    name: str
    size: int
    note: str
    update: bool = True
    rollout: bool = True


def memory_plan(config: TrainConfig, shape: Shape, ranks: int) -> list[Item]:
    """What each rank holds with this config; `update` and `rollout` say in which phases."""
    master = _BYTES[config.model.dtype]
    compute = 2 if config.model.autocast == "bfloat16" else master
    parts = ranks if config.parallel == "fsdp" else 1
    spread = f", 1/{parts} of it on each rank" if parts > 1 else ""
    n, lora = shape.parameters, config.model.lora
    items = [Item("weights", n * master // parts, f"{n:,} parameters in {config.model.dtype}{spread}")]
    if lora is not None:
        adapters = adapter_numbers(shape, lora)
        items.append(Item("adapters", adapters * 4, f"{adapters:,} numbers in float32"))
        items.append(Item("gradients", adapters * 4, "one an adapter's number", rollout=False))
    else:
        items.append(Item("gradients", n * master // parts, f"one a parameter{spread}", rollout=False))
    items.append(_optimizer(config, shape, master, parts))
    if parts > 1:
        # The embedding belongs to the group that stays gathered between the two passes; layers come and go.
        gathered = shape.vocabulary * shape.hidden + shape.matrices // len(shape.layers)
        note = "embedding and one layer, whole, with their gradients"
        items.append(Item("gathered", 2 * gathered * master, note, rollout=False))
    if config.loss.kl.mode != "off" and lora is None:
        if config.loss.kl.offload:
            # On the device it takes the place of the gradients, which are not there yet.
            items.append(Item("reference", n * master, "in the host's memory instead", update=False, rollout=False))
        else:
            items.append(Item("reference", n * master // parts, f"the frozen start{spread}"))
    if compute < master:
        items.append(Item("autocast copies", n * compute, "weights in bfloat16 while a forward pass runs"))
    tokens = max(config.loss.micro_batch_tokens, config.rollout.max_tokens)
    items.append(_activations(config, shape, tokens, master))
    chunk = config.loss.logprob_chunk
    logits = 2 * chunk * shape.vocabulary * 4 + chunk * shape.vocabulary * compute
    # The projection's gradient is summed in float32, then cast.
    logits += shape.vocabulary * shape.hidden * (4 + (compute if compute < 4 else 0))
    note = f"{chunk} positions x {shape.vocabulary:,}, and the projection's gradient"
    items.append(Item("logits chunk", logits, note, rollout=False))
    return [*items, *_rollout(config, shape, ranks, compute)]


def _rollout(config: TrainConfig, shape: Shape, ranks: int, compute: int) -> list[Item]:
    """The engine's part: caches of all episodes at the whole budget; vLLM has weights of its own beside them."""
    if config.rollout.engine == "server":
        return []
    vllm = config.rollout.vllm if config.rollout.engine == "vllm" else None
    if vllm is not None:
        compute = 4 if vllm.dtype == "float32" else 2
    # vLLM keeps what it took unless it sleeps during the update.
    stays = vllm is not None and not vllm.sleep
    episodes = min(config.rollout.concurrency, config.rollout.questions // ranks * config.rollout.candidates)
    size = episodes * (config.rollout.max_tokens * shape.cache_width * compute + shape.state_values * 4)
    note = f"{episodes} episodes of {config.rollout.max_tokens:,} tokens, {shape.cache_width * compute:,} bytes a token"
    cache = Item("KV cache and states", size, note, update=stays)
    if vllm is None:
        return [cache]
    note = f"in {vllm.dtype}; these two within rollout.vllm.gpu_memory, {100 * vllm.gpu_memory:.0f}% of the GPU"
    return [Item("vLLM's weights", shape.parameters * compute, note, update=stays), cache]


def adapter_numbers(shape: Shape, lora: LoraConfig) -> int:
    """How many numbers the adapters have: rank x (inputs + outputs) for each adapted layer."""
    targets = shape.linears if lora.targets == "all-linear" else lora.targets
    return lora.rank * sum(shape.linears.get(name, 0) for name in targets)


def _optimizer(config: TrainConfig, shape: Shape, master: int, parts: int) -> Item:
    lora, name = config.model.lora, config.optimizer.name
    trained, size = (shape.parameters, master) if lora is None else (adapter_numbers(shape, lora), 4)
    if name == "muon" and lora is None:
        values = shape.matrices + 2 * (shape.parameters - shape.matrices)
        return Item("optimizer", values * master, "one moment a hidden-matrix weight, two for the rest")
    if name == "adamw8bit":
        # A byte a moment, and a float32 scale for each block of 256.
        return Item("optimizer", 2 * trained + 2 * trained // 64, "AdamW: two moments of 8 bits a number")
    return Item("optimizer", 2 * trained * size // parts, "AdamW: two moments a number that is trained")


def _activations(config: TrainConfig, shape: Shape, tokens: int, master: int) -> Item:
    autocast, dtype = config.model.autocast == "bfloat16", getattr(torch, config.model.dtype)
    layers = Counter(shape.layers)
    memory = {kind: layer_memory(shape.config, kind, dtype, autocast) for kind in layers}
    n, widest = len(shape.layers), max(memory.values(), key=lambda layer: layer.peak)
    if config.model.gradient_checkpointing:
        # Each layer's input stays; one layer at a time is computed again.
        size = tokens * (n * shape.hidden * master + widest.peak)
        note = f"{tokens:,} tokens: inputs of {n} layers, one layer computed again"
    else:
        kept = sum(count * memory[kind].kept for kind, count in layers.items())
        size = tokens * (kept + widest.peak - widest.kept)
        note = f"{tokens:,} tokens, all {n} layers, no checkpointing"
    return Item("activations", size, note, rollout=False)


def peaks(items: list[Item]) -> tuple[int, int]:
    """Bytes held during the update and during the rollouts."""
    return sum(item.size for item in items if item.update), sum(item.size for item in items if item.rollout)


def format_bytes(size: float) -> str:
    """`12.3 GiB`, or `12.3 MiB` below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / MIB:.1f} MiB"
