"""Turn a GGUF file into a model folder that transformers and vLLM load: float32 weights, tokenizer, chat template.

The weights are the dequantized ones, exactly: a quantized model stays what it was, it only becomes readable.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from shared.engines.tokenizer import first_line
from shared.errors import SetupError

# How text is cut before the merges, by the GGUF key tokenizer.ggml.pre. transformers takes GPT-2's way for all of them.
_PRE_TOKENIZERS: Mapping[str, Any] = MappingProxyType(
    {
        "smollm": lambda: pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        ),
        "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    }
)


def convert_gguf(source: Path, out: Path) -> None:
    """Write the model in `source` to the new folder `out`, in float32.

    generation_config.json stops on the end of a turn and on the end of the text. SetupError for a file that cannot be
    read, cuts text in a way that is not known here, or has no chat template.
    """
    logging.disable_progress_bar()
    try:
        pre = _pre_tokenizer_name(source)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        quantized = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, local_files_only=True, dtype=torch.float32
        )
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise SetupError(f"{source} cannot be read as a model: {first_line(error)}") from error
    if not tokenizer.chat_template:
        raise SetupError(f"{source} has no chat template: take a model that was tuned for conversations")
    tokenizer.backend_tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    # A model that was loaded from a quantized file refuses to be saved; one of the same shape does not.
    config = quantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        eos_token_id=_stop_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _pre_tokenizer_name(source: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    name = str(field.contents()) if field is not None else "(none)"
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise SetupError(f"{source} cuts text in the way of {name}: known are {known}")
    return name


def _stop_ids(tokenizer: Any) -> list[int]:
    """The end-of-turn and end-of-text tokens that the tokenizer has."""
    names = [text for text in tokenizer.get_vocab() if re.fullmatch(r"<\|(im_end|endoftext)\|>", text)]
    return sorted({tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(names)})
