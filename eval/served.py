"""A server behind `--base-url`, checked before it is used: what it serves, what it takes, how its template speaks.

With the served model's tokenizer at hand (`--tokenizer`, or a model folder on this machine) and a server that takes
token ids, an episode is token in, token out as with every engine. Otherwise the server is sent messages; then a token
of the episode is a byte of its text, and its token budget is taken as four bytes a token.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shared.chat import THINK, THINK_END, ByteCodec, ChatCodec, TokenizerCodec
from shared.engines.http import Refused, Server
from shared.engines.openai import (
    ChatExchange,
    Exchange,
    ServedEngine,
    TokenExchange,
    served_model,
    takes_extras,
    takes_token_ids,
)
from shared.errors import SetupError
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS

API_KEY = "OPENAI_API_KEY"
# Seconds for which a server that fails is asked again: before the run, where the address may be wrong, and in the run.
_PROBE_PATIENCE, _RUN_PATIENCE = 3.0, 60.0
_PROBE_TEXT = "naïve 1234  SELECT\n\tcount(*) FROM \u8868 -- \U0001f41c"
_START = ({"role": "system", "content": EXEC_PLAN_TOOL_INSTRUCTIONS}, {"role": "user", "content": _PROBE_TEXT})


class Wanted(Protocol):
    """Which server, and how to ask it: what `connect` reads of an EvalConfig, or of the agent's settings."""

    @property
    def base_url(self) -> str | None: ...
    @property
    def model(self) -> str | None: ...
    @property
    def tokenizer(self) -> Path | None: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def max_tokens(self) -> int: ...


class MessagesCodec(ByteCodec):
    """ByteCodec whose ids can be read as messages again: control ids are told from text, so the roles are certain."""

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that `ids` spell, without the opening of the turn that is asked for.

        An assistant turn is sent back as it came: the think block of a model that does not think is left out again.
        """
        start, end = (256 + self.CONTROLS.index(name) for name in ("<|im_start|>", "<|im_end|>"))
        turns: list[list[int]] = []
        for i in ids:
            if i == start:
                turns.append([])
            elif turns and i != end:
                turns[-1].append(i)
        messages = []
        for turn in turns[:-1]:
            role, _, content = self.decode(turn).partition("\n")
            if role == "assistant":
                content = content.removeprefix(f"{THINK}\n{THINK_END}")
            # What stands between two turns belongs to neither.
            messages.append({"role": role, "content": content.removesuffix("\n")})
        return messages

    def reply_ids(self, text: str, *, closed: bool) -> list[int]:
        """Ids of an assistant turn with this text, with the end of the turn when it is `closed`."""
        ids = self.turn_ids(text)
        return ids if closed else ids[:-1]


@dataclass(frozen=True)
class Served:
    """A checked server. `settings` say how it is asked, `versions` what it runs, `tokenizer` the folder in use."""

    server: Server
    model: str
    codec: ChatCodec
    exchange: Exchange
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    tokenizer: Path | None

    @property
    def bytes_per_token(self) -> int:
        """How many of the codec's ids count as one token of an episode's budget: see `Prepared`."""
        return 1 if isinstance(self.codec, TokenizerCodec) else ByteCodec.BYTES_PER_TOKEN

    def load(self, concurrency: int) -> ServedEngine:
        """The engine."""
        return ServedEngine(self.exchange, concurrency=concurrency)


def connect(config: Wanted) -> Served:
    """Ask the server what it serves and how it can be asked. SetupError that says what does not fit."""
    if config.base_url is None:
        raise SetupError("--engine openai needs --base-url, the server's address, like http://localhost:8000/v1")
    server = Server(config.base_url, os.environ.get(API_KEY) or None, patience=_PROBE_PATIENCE)
    entry = served_model(server, config.model)
    model = str(entry["id"])
    longest = entry.get("max_model_len")
    if isinstance(longest, int) and longest < config.max_tokens:
        raise SetupError(
            f"the server takes {longest} tokens, an episode may have {config.max_tokens}: give --max-tokens {longest}"
        )
    version = _beside(server, "/version", None).get("version")
    settings: dict[str, Any] = {"served_model": model, "root": entry.get("root")}
    versions = {"server": str(version)} if version else {}
    patient = replace(server, patience=_RUN_PATIENCE)
    folder = _tokenizer_folder(config, entry)
    codec = TokenizerCodec(_load_tokenizer(folder)) if folder is not None and config.endpoint != "chat" else None
    if codec is not None and takes_token_ids(server, model, codec.prompt_ids("Answer.", "Yes?")):
        checked = _check_tokens(server, model, codec)
        settings |= {"endpoint": "/v1/completions", "prompts": "token ids", "template_checked": checked}
        return Served(
            patient, model, codec, TokenExchange(patient, model, f"served:{model}"), settings, versions, folder
        )
    if config.endpoint == "completions":
        lacking = "a tokenizer: give --tokenizer" if codec is None else "a server that takes token ids, as vLLM does"
        raise SetupError(f"--endpoint completions needs {lacking}")
    extras = takes_extras(server, model)
    checked = _check_template(server, model, None)
    settings |= {
        "endpoint": "/v1/chat/completions",
        "prompts": "messages",
        "tokens": f"bytes of text, {ByteCodec.BYTES_PER_TOKEN} to a token of the budget",
        "template_checked": checked,
        "not_applied": [] if extras else ["top_k", "enable_thinking"],
    }
    messages = MessagesCodec()
    exchange = ChatExchange(patient, model, f"served:{model}", messages, extras)
    return Served(patient, model, messages, exchange, settings, versions, None)


def _tokenizer_folder(config: Wanted, entry: Mapping[str, Any]) -> Path | None:
    """The folder with the served model's tokenizer: the one named, or the model's own where it lies on this machine."""
    if config.tokenizer is not None:
        if not config.tokenizer.is_dir():
            raise SetupError(f"--tokenizer {config.tokenizer} is no folder: give the served model's")
        return config.tokenizer
    for name in (config.model, entry.get("root"), entry["id"]):
        if name and (Path(name) / "tokenizer_config.json").is_file():
            return Path(name)
    return None


def _load_tokenizer(folder: Path) -> Any:
    from shared.engines.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _check_tokens(server: Server, model: str, codec: TokenizerCodec) -> bool:
    """Hold tokenizer and template against the server's; False when it does not show them. SetupError if they differ."""
    theirs = _beside(server, "/tokenize", {"model": model, "prompt": _PROBE_TEXT, "add_special_tokens": False})
    if "tokens" in theirs and theirs["tokens"] != codec.encode_text(_PROBE_TEXT):
        raise SetupError(
            f"the server tokenizes otherwise than the tokenizer given for {model}: give --tokenizer its own"
        )
    ours = codec.decode(codec.prompt_ids(EXEC_PLAN_TOOL_INSTRUCTIONS, _PROBE_TEXT))
    return _check_template(server, model, ours)


def _check_template(server: Server, model: str, ours: str | None) -> bool:
    """Hold the server's chat template against what an episode needs; False when the server does not show it.

    The prompt of the first turn must be `ours` to the byte, and the prompt of the second turn must extend the first
    one and what was sampled after it. SetupError otherwise.
    """
    first = _rendered(server, model, _START)
    said = f"{THINK}\nGoal.\n{THINK_END}\n\n" + '{"tool": "list_tables", "args": {}}'
    reply = {"role": "user", "content": "<tool_response>\nitem\n</tool_response>"}
    second = _rendered(server, model, (*_START, {"role": "assistant", "content": said}, reply))
    if first is None or second is None:
        return False
    if ours is not None and first != ours:
        raise SetupError(f"the server's chat template differs from the one given for {model}: give --tokenizer its own")
    opened = first.rstrip().endswith(THINK)
    if not second.startswith(first + (said.removeprefix(f"{THINK}\n") if opened else said)):
        raise SetupError(
            f"the server's chat template of {model} rewrites earlier turns (it drops or changes the think block): "
            "serve it with a template that keeps them, such as Qwen3.5's"
        )
    return True


def _rendered(server: Server, model: str, messages: Sequence[Mapping[str, str]]) -> str | None:
    """The prompt that the server makes of `messages`, as text; None when it does not show it (vLLM does)."""
    body = {
        "model": model,
        "messages": list(messages),
        "add_generation_prompt": True,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    tokens = _beside(server, "/tokenize", body).get("tokens")
    text = _beside(server, "/detokenize", {"model": model, "tokens": tokens}).get("prompt") if tokens else None
    return text if isinstance(text, str) else None


def _beside(server: Server, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
    """An answer of what is not OpenAI's interface; empty where the server has no such thing."""
    try:
        return server.beside(path, body)
    except Refused:
        return {}
