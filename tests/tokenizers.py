"""A byte-level tokenizer with Qwen3.5's control tokens, built in memory, for tests that need no trained model."""

from pathlib import Path
from typing import Any

CONTROLS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<think>", "</think>", "<tool_response>", "</tool_response>")


def template(name: str) -> str:
    """A chat template that ships with TRL, e.g. `qwen3_5_think`: the real ones, as an oracle."""
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def byte_tokenizer(chat_template: str | None = None, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """One token a byte, plus `merges` (BPE pairs, in byte-level letters), plus the control tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    return fast
