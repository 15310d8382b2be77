"""A minimal random Qwen3.5 text model in the canonical 3:1 layout with a small tokenizer, and a finished run of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS
from tests.train.scripted_run import finish

VOCABULARY = 1000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and merges learned from the system prompt alone, so that the prompt is short."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([EXEC_PLAN_TOOL_INSTRUCTIONS], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    wrapped.add_special_tokens({"additional_special_tokens": SPECIAL})
    wrapped.chat_template = TEMPLATE
    return wrapped


def tiny_model(seed: int = 0, std: float = 0.1) -> Qwen3_5ForCausalLM:
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        tie_word_embeddings=True,
        initializer_range=std,
        max_position_embeddings=4096,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    )
    torch.manual_seed(seed)
    return Qwen3_5ForCausalLM(config).eval()


@pytest.fixture
def make_model() -> Callable[..., Qwen3_5ForCausalLM]:
    """A fresh model for a seed; equal seeds give equal weights."""
    return tiny_model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model folder, as the start of a run."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """An uninterrupted run of five steps."""
    folder = tmp_path_factory.mktemp("finished")
    finish(folder, model_folder)
    return folder
