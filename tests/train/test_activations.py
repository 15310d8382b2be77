"""The plan's activations against what a whole model really holds in a forward and a backward pass."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from train.config import TrainConfig, load_train_config
from train.memory import memory_plan, model_shape

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
TOKENS = 1500
CONFIG = Qwen3_5TextConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=6,
    layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    tie_word_embeddings=True,
)


def held_bytes(checkpointing: bool, autocast: bool) -> int:
    """The most that one row of TOKENS tokens adds to weights and gradients, by watching every tensor of a real pass."""
    model = Qwen3_5ForCausalLM(CONFIG).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker: Any = MemTracker()
    tracker.track_external(model)
    with warnings.catch_warnings(), tracker:
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            output = model.get_decoder()(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
        output.last_hidden_state.sum().backward()
    (device,) = tracker.get_tracker_snapshot("peak").values()
    return int(device["Total"]) - 8 * sum(parameter.numel() for parameter in model.parameters())


def planned_bytes(config: TrainConfig) -> int:
    (item,) = [item for item in memory_plan(config, model_shape(CONFIG), 1) if item.name == "activations"]
    return item.size


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_plan_is_what_a_pass_holds(checkpointing: bool, autocast: str) -> None:
    overrides = [
        f"model.gradient_checkpointing={str(checkpointing).lower()}",
        f"model.autocast={autocast}",
        f"loss.micro_batch_tokens={TOKENS}",
    ]
    planned = planned_bytes(load_train_config(DEMO, overrides))
    assert planned == pytest.approx(held_bytes(checkpointing, autocast == "bfloat16"), rel=0.05)
