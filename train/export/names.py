"""What the name of a tensor says: which part of the model it is, and which other name means the same tensor."""

import re
from typing import Literal

Part = Literal["language", "vision", "MTP"]
Kind = Literal[
    "embedding", "attention", "linear attention", "A_log, dt_bias", "MLP", "norms", "head", "vision", "MTP", "other"
]
VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIXES = ("mtp.", "model.mtp.")
TEXT_PREFIX, FULL_PREFIX = "model.", "model.language_model."
LM_HEAD = "lm_head.weight"
EMBEDDING_ENDING = "embed_tokens.weight"

_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("head", re.compile(r"lm_head\.")),
    ("embedding", re.compile(r"embed_tokens\.")),
    ("A_log, dt_bias", re.compile(r"\.(A_log|dt_bias)$")),
    ("norms", re.compile(r"norm\.(weight|bias)$")),
    ("linear attention", re.compile(r"\.linear_attn\.")),
    ("attention", re.compile(r"\.self_attn\.")),
    ("MLP", re.compile(r"\.mlp\.")),
)


def part_of(name: str) -> Part:
    """The part of the model that a tensor belongs to; whatever is neither vision nor MTP is the language model's."""
    if name.startswith(VISION_PREFIXES):
        return "vision"
    return "MTP" if name.startswith(MTP_PREFIXES) else "language"


def kind_of(name: str) -> Kind:
    """What a tensor does, for tables: the vision tower and the MTP head are one kind each."""
    part = part_of(name)
    if part != "language":
        return part
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


def text_name(name: str) -> str:
    """The name as the text class spells it: `model.…` for `model.language_model.…`. Other names stay as they are.

    A doubled prefix is no spelling of anything and stays as well.
    """
    doubled = FULL_PREFIX + FULL_PREFIX.removeprefix(TEXT_PREFIX)
    if name.startswith(FULL_PREFIX) and not name.startswith(doubled):
        return TEXT_PREFIX + name.removeprefix(FULL_PREFIX)
    return name


def spellings(name: str) -> set[str]:
    """A language-model name as the text class and as the full class spell it; just itself where there is one way."""
    text = text_name(name)
    rest = text.removeprefix(TEXT_PREFIX)
    if rest == text or rest.startswith(FULL_PREFIX.removeprefix(TEXT_PREFIX)):
        return {name}
    return {text, FULL_PREFIX + rest}
