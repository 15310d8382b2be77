"""Chat turns as token ids, token in and token out: what was sampled is never decoded and tokenized again.

A `ChatCodec` is built once from a chat template. The template is rendered with placeholders, and what lies
between them is tokenized once; contents (the system prompt, the question, tool results) are tokenized on their own,
in a way that no text in them can become a control token. So the prompt of turn k+1 is always the prompt of turn k,
plus the sampled ids, plus the ids of the result turn.

No module of this kind imports transformers: `TokenizerCodec` takes a loaded tokenizer.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shared.errors import SetupError

THINK, THINK_END = "<think>", "</think>"


@dataclass(frozen=True)
class TurnTexts:
    """The literal text of a chat template around the contents of an episode.

    A conversation is `system + S + user + U + opening`, then for each turn the sampled text, which ends in `turn_end`
    when the model ended it, and for each result `result + R + reopening`. `opening` and `reopening` end with
    the start of an assistant turn.
    """

    system: str
    user: str
    opening: str
    turn_end: str
    result: str
    reopening: str


class ChatCodec(ABC):
    """Token ids of an episode's parts. Subclasses say how plain text and control text become ids."""

    texts: TurnTexts
    stop_ids: tuple[int, ...]

    @abstractmethod
    def encode_text(self, text: str) -> list[int]:
        """Ids of a content: no control token can come out of it, whatever it says."""

    @abstractmethod
    def encode_control(self, text: str) -> list[int]:
        """Ids of template text, where control tokens count as such."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included, invalid UTF-8 replaced."""

    @property
    def template_sha256(self) -> str:
        """Identity of the template as this codec uses it."""
        return hashlib.sha256(repr(self.texts).encode()).hexdigest()

    @property
    def opens_think(self) -> bool:
        """True when the template opens the assistant's think block, so that the sampled text starts inside it."""
        return self.texts.opening.rstrip().endswith(THINK)

    def prompt_ids(self, system: str, user: str) -> list[int]:
        """Ids of the first prompt, up to and including the opening of the assistant's turn."""
        texts = self.texts
        return [
            *self.encode_control(texts.system),
            *self.encode_text(system.strip()),
            *self.encode_control(texts.user),
            *self.encode_text(user.strip()),
            *self.encode_control(texts.opening),
        ]

    def result_ids(self, text: str, *, turn_closed: bool) -> list[int]:
        """Ids between two samples: the end of the turn if the model did not end it, the result, the next opening."""
        texts = self.texts
        return [
            *([] if turn_closed else self.encode_control(texts.turn_end)),
            *self.encode_control(texts.result),
            *self.encode_text(text.strip()),
            *self.encode_control(texts.reopening),
        ]

    def turn_text(self, ids: Sequence[int]) -> str:
        """What the model said: its ids as text, without the stop token, with the `<think>` that the template opened."""
        closed = bool(ids) and ids[-1] in self.stop_ids
        text = self.decode(ids[:-1] if closed else ids)
        return f"{THINK}\n{text}" if self.opens_think else text

    def turn_ids(self, text: str) -> list[int]:
        """Ids with which a model would say `text` and end its turn: for scripted engines and supervised traces.

        The first think block's tags become control tokens, everything else is content. When the template opens the
        think block, a text without one gets an empty one.
        """
        head, tag, rest = text.partition(THINK_END)
        if not tag:
            head, rest = ("", text) if THINK not in text else (text, "")
            tag = THINK_END if THINK not in text else ""
        head = re.sub(rf"^\s*{THINK}\n?", "", head)
        if self.opens_think:
            parts = [*self.encode_text(head), *(self.encode_control(tag) if tag else []), *self.encode_text(rest)]
        elif THINK in text:
            parts = [
                *self.encode_control(THINK),
                *self.encode_text(f"\n{head}"),
                *(self.encode_control(tag) if tag else []),
                *self.encode_text(rest),
            ]
        else:
            parts = self.encode_text(text)
        return [*parts, self.stop_ids[0]]


class TokenizerCodec(ChatCodec):
    """The codec of a transformers tokenizer with a chat template.

    Raises SetupError when the tokenizer has no chat template, or when the template is unfit for an agent loop: an
    earlier turn's think block must stay in the prompt of the next turn.
    """

    def __init__(self, tokenizer: Any, *, stop_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        controls = sorted((t.content for t in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        self._cache: dict[str, list[int]] = {}
        self.texts = _template_texts(tokenizer)
        end = self.encode_control(self.texts.turn_end)
        if len(end) != 1:
            raise SetupError(
                f"the chat template of {_name(tokenizer)} ends a turn with {self.texts.turn_end!r}, "
                "which is not one token; use the tokenizer that belongs to the model"
            )
        extra = [tokenizer.get_vocab().get("<|endoftext|>"), tokenizer.eos_token_id, *stop_ids]
        known = {i for i in extra if isinstance(i, int)}
        self.stop_ids = (end[0], *sorted(known - {end[0]}))

    def encode_text(self, text: str) -> list[int]:
        # A control token's text is cut after its first character, so that its pieces are tokenized as plain text.
        cuts = [0, *(match.start() + 1 for match in self._controls.finditer(text)), len(text)]
        ids: list[int] = []
        for start, end in pairwise(cuts):
            ids += self._ids(text[start:end])
        return ids

    def encode_control(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = self._ids(text)
        return self._cache[text]

    def _ids(self, text: str) -> list[int]:
        # Lone surrogates (cut escapes in data) have no UTF-8 form; tokenizers refuse them.
        text = text.encode("utf-8", "replace").decode("utf-8")
        result: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return result

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


class ByteCodec(ChatCodec):
    """One id a byte, and ids of their own for the control tokens: for scripted engines, without any model folder."""

    CONTROLS = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", THINK, THINK_END, "<tool_response>", "</tool_response>")
    BYTES_PER_TOKEN = 4  # a rough figure of common tokenizers, so that token budgets keep their meaning

    def __init__(self) -> None:
        self.texts = TurnTexts(
            system="<|im_start|>system\n",
            user="<|im_end|>\n<|im_start|>user\n",
            opening="<|im_end|>\n<|im_start|>assistant\n<think>\n",
            turn_end="<|im_end|>",
            result="\n<|im_start|>user\n<tool_response>\n",
            reopening="\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        )
        self.stop_ids = (256, 258)
        self._control = re.compile("|".join(map(re.escape, self.CONTROLS)))

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def encode_control(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for match in self._control.finditer(text):
            ids += [*text[end : match.start()].encode(), 256 + self.CONTROLS.index(match.group())]
            end = match.end()
        return [*ids, *text[end:].encode()]

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(bytes([i]) if i < 256 else self.CONTROLS[i - 256].encode() for i in ids)
        return data.decode("utf-8", "replace")


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def _template_texts(tokenizer: Any) -> TurnTexts:
    """Read a chat template's literal texts off two renderings with placeholders; check that one extends the other."""
    if not getattr(tokenizer, "chat_template", None):
        raise SetupError(
            f"the tokenizer of {_name(tokenizer)} has no chat template; add the model's chat_template.jinja there"
        )
    system, user, think, answer, result = (f"\u27e6{name}\u27e7" for name in ("s", "u", "t", "a", "r"))

    def render(messages: list[dict[str, str]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return text

    start = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    try:
        first = render(start)
        said = f"{THINK}\n{think}\n{THINK_END}\n\n{answer}"
        reply = {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"}
        second = render([*start, {"role": "assistant", "content": said}, reply])
    except Exception as error:
        raise SetupError(f"the chat template of {_name(tokenizer)} fails on a tool conversation: {error}") from error
    sampled = said.removeprefix(f"{THINK}\n") if first.rstrip().endswith(THINK) else said
    if not second.startswith(first + sampled):
        raise SetupError(
            f"the chat template of {_name(tokenizer)} rewrites earlier turns (it drops or changes the think block), "
            "so a turn's prompt would not extend the last one; use a template that keeps them, such as Qwen3.5's"
        )
    head, between = first.split(system)
    middle, opening = between.split(user)
    before, after = second[len(first) + len(sampled) :].split(result)
    turn_end = re.match(r"\s*<[^<>\s]+>", before)
    if turn_end is None:
        raise SetupError(f"the chat template of {_name(tokenizer)} has no end-of-turn token after an assistant turn")
    return TurnTexts(head, middle, opening, turn_end.group(), before[turn_end.end() :], after)
