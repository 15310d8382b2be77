"""The tokenizer of the demo's model: bytes, syllables, numbers, and whole phrases of the protocol as single pieces.

A tiny model on a CPU pays for every token. So whatever an episode over toy databases repeats (the system prompt,
the skeleton of a call, an SQL clause, the budget line) is one piece, and an episode takes about 120 tokens. Names are
never pieces: they are spelt from syllables, so a model has to copy a new name as a big model does.

All pieces have the same score, so text is cut into as few as possible. Every byte is a piece too: nothing is lost.
Ids are given in sorted order, control tokens last, as in Qwen3.5.
"""

import re
from itertools import pairwise

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.data.toy import FIRST_SYLLABLES, KINDS, SECOND_SYLLABLES, SUFFIXES
from shared.tools.protocol import (
    EXEC_PLAN_TOOL_INSTRUCTIONS,
    TOOLS,
    budget_line,
    closing_message,
    first_user_message,
)
from train.tiny_template import CHAT_TEMPLATE
from train.traces import PLANS

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
# Added tokens, but not special ones: text, to a decoder.
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_SQL = (
    *("SELECT ", " FROM ", " WHERE ", " = ", " ORDER BY ", " DESC LIMIT 1", " GROUP BY ", ", ", ", SUM("),
    *("SELECT T1.", ", T2.", " AS T1 JOIN ", " AS T2 ON T1.", "_id = T2.id", " WHERE T2."),
    *("SELECT COUNT(*) FROM ", "SELECT MAX(", "SELECT MIN(", "SELECT SUM(", "SELECT AVG(", ")", ") FROM "),
)
_RESULTS = (
    *("CREATE TABLE ", " (id INTEGER PRIMARY KEY, ", " INTEGER, ", " INTEGER)", "_id INTEGER REFERENCES ", "(id))"),
    *("Error: no such table: ", "Error: no such column: ", "; did you mean ", "?"),
)
_ROLES = ("\n", "\n\n", "system\n", "user\n", "assistant\n")


def phrases() -> list[str]:
    """Every text that is one piece besides bytes, syllables and numbers, sorted."""
    pieces = {*_as_content(EXEC_PLAN_TOOL_INSTRUCTIONS), *_as_content(closing_message(None)), *_SQL, *_RESULTS, *_ROLES}
    pieces |= {f"\n{budget_line(turns)}" for turns in range(7)}
    pieces |= {f"{plan}\n" for plan in PLANS.values()}
    for tool in TOOLS.values():
        arguments = f'{{"{tool.params[0].name}": "' if tool.params else "{}}"
        pieces.add(f'\n\n{{"tool": "{tool.name}", "args": {arguments}')
    pieces.add('"}}')
    for kind in KINDS.values():
        pieces |= {part for part in re.split(r"\{\w\}", first_user_message(kind.question)) if len(part) > 1}
    return sorted(pieces)


def _as_content(text: str) -> list[str]:
    """The parts in which a codec tokenizes content: cut after the first character of each control text in it."""
    controls = "|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *TEXT_TOKENS))
    cuts = [0, *(match.start() + 1 for match in re.finditer(controls, text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template; the same in every process."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = [*phrases(), *FIRST_SYLLABLES, *SECOND_SYLLABLES, *SUFFIXES, *(str(n) for n in range(100))]
    pieces = set(pre_tokenizers.ByteLevel.alphabet())
    pieces |= {"".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in texts}
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in sorted(pieces)], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = to_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=32_768,
        clean_up_tokenization_spaces=False,
    )
