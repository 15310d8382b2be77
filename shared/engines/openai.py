"""An OpenAI-compatible server as an engine: requests go out one by one, and no episode waits for another.

Two ways of asking, both with sampling parameters in full:

- `TokenExchange`: token ids in and out through /v1/completions, with the log-probability of each. vLLM serves this. An
  episode is then the same, id by id, as in one of the engines of this process.
- `ChatExchange`: messages through /v1/chat/completions, for servers that take nothing else. The server's chat template
  makes the prompt, its tokens stay unknown, and so do the log-probabilities (NaN).

The network is waited for in threads; `step` hands over what has come back.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from shared.engines.base import Completion, Request, SamplingParams, StopReason
from shared.engines.http import Refused, Server
from shared.errors import SetupError

THINK, THINK_END = "<think>", "</think>"
_SEED_MASK = 2**63 - 1
_STEP_SECONDS = 0.02

Exchange = Callable[[Request], Completion]


class ServedEngine:
    """Serves `shared.engines.base.Engine` with a server; at most `concurrency` requests are under way.

    `step` waits for an answer for a fiftieth of a second at most, so that the caller gets to add what has become
    ready. What an exchange raises comes out of `step`: SetupError when the server fails for good.
    """

    batches_by_itself = True

    def __init__(self, exchange: Exchange, *, concurrency: int = 64) -> None:
        self._exchange = exchange
        self._asked: SimpleQueue[Request | None] = SimpleQueue()
        self._answered: SimpleQueue[tuple[str, Completion | Exception]] = SimpleQueue()
        self._live: dict[str, str] = {}
        # Daemons, because a request that is under way must not keep an interrupted program from ending.
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(concurrency)]
        for thread in self._threads:
            thread.start()

    def add(self, request: Request) -> None:
        """Queue a request; it is sent as soon as one of the threads is free."""
        self._live[request.request_id] = request.session
        self._asked.put(request)

    def has_work(self) -> bool:
        """True while an answer is awaited."""
        return bool(self._live)

    def step(self) -> list[Completion]:
        """The answers that have come; waits a moment for the first."""
        done: list[Completion] = []
        try:
            while self._live:
                request_id, answer = self._answered.get(timeout=0 if done else _STEP_SECONDS)
                if self._live.pop(request_id, None) is None:
                    continue
                if isinstance(answer, Exception):
                    raise answer
                done.append(answer)
        except Empty:
            pass
        return done

    def end_session(self, session: str) -> None:
        """Forget what is still asked for the episode; what is under way is not awaited."""
        for request_id in [name for name, owner in self._live.items() if owner == session]:
            del self._live[request_id]

    def close(self) -> None:
        """Forget everything and let the threads end."""
        self._live.clear()
        for _ in self._threads:
            self._asked.put(None)

    def _serve(self) -> None:
        while (request := self._asked.get()) is not None:
            if request.request_id not in self._live:
                continue
            try:
                answer: Completion | Exception = self._exchange(request)
            except Exception as error:
                answer = error
            self._answered.put((request.request_id, answer))


@dataclass(frozen=True)
class TokenExchange:
    """Token ids through /v1/completions. `weights` names the weights in every completion."""

    server: Server
    model: str
    weights: str

    def __call__(self, request: Request) -> Completion:
        """Ask once. SetupError when the server refuses, or answers with another model or without ids."""
        params = request.params
        body = {
            "prompt": list(request.prompt_ids),
            **_sampling(self.model, params),
            "top_k": params.top_k,
            "stop_token_ids": list(params.stop_token_ids),
            # Only the stops of the request count, not those of the model folder.
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = _ask(self.server, "/completions", body)
        choice = _choice(answer, self.model)
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        ids = _ids(choice.get("token_ids"))
        if ids is None or not isinstance(logprobs, list) or len(logprobs) != len(ids):
            raise SetupError(
                f"the server at {self.server.base_url} returns no token ids with log-probabilities: "
                "update it, or give --endpoint chat"
            )
        known = tuple(math.nan if value is None else float(value) for value in logprobs)
        return Completion(request.request_id, ids, known, _stop_reason(choice), self.weights)


class MessageCodec(Protocol):
    """What a chat exchange needs of a codec: from ids to messages, and from a reply to ids."""

    def messages(self, ids: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that `ids` spell, without the opening of the turn that is asked for."""

    def reply_ids(self, text: str, *, closed: bool) -> list[int]:
        """Ids with which the model would have said `text`; `closed` when it ended its turn."""


@dataclass(frozen=True)
class ChatExchange:
    """Messages through /v1/chat/completions. `extras` are what the server takes beyond OpenAI's own parameters."""

    server: Server
    model: str
    weights: str
    codec: MessageCodec
    extras: bool = True

    def __call__(self, request: Request) -> Completion:
        """Ask once. SetupError when the server refuses or answers with another model."""
        body = chat_body(self.model, self.codec.messages(request.prompt_ids), request.params, extras=self.extras)
        choice = _choice(_ask(self.server, "/chat/completions", body), self.model)
        reason = _stop_reason(choice)
        ids = self.codec.reply_ids(reply_text(choice.get("message") or {}), closed=reason == "stop")
        return Completion(request.request_id, tuple(ids), (math.nan,) * len(ids), reason, self.weights)


def chat_body(
    model: str, messages: Sequence[Mapping[str, str]], params: SamplingParams, *, extras: bool
) -> dict[str, Any]:
    """The body of a chat request. Without `extras`: no top-k, and thinking as the server has it by default."""
    body = {"messages": list(messages), **_sampling(model, params)}
    if extras:
        body |= {"top_k": params.top_k, "chat_template_kwargs": {"enable_thinking": True}, "skip_special_tokens": False}
    return body


def reply_text(message: Mapping[str, Any]) -> str:
    """What the model said, its think block included: servers with a reasoning parser hand that over apart."""
    content = str(message.get("content") or "")
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not reasoning:
        return content
    closing = f"\n{THINK_END}\n\n{content}" if content else ""
    return f"{THINK}\n{str(reasoning).strip()}{closing}"


def served_model(server: Server, name: str | None) -> dict[str, Any]:
    """The entry of /v1/models that `name` means, or the only one. SetupError when there is none, or more than one.

    A model is known by its id, and (vLLM) by the folder it was loaded from, its `root`.
    """
    try:
        data = server.get("/models").get("data")
    except Refused as error:
        raise SetupError(
            f"the server at {server.base_url} does not list its models ({error}): check --base-url"
        ) from None
    entries = [entry for entry in data if isinstance(entry, dict) and entry.get("id")] if isinstance(data, list) else []
    if not entries:
        raise SetupError(f"the server at {server.base_url} serves no model: check --base-url")
    if name is None and len(entries) == 1:
        return entries[0]
    for entry in entries:
        if name is not None and name in (entry["id"], entry.get("root")):
            return entry
    wanted = f"not {name}" if name is not None else "more than one"
    served = ", ".join(str(entry["id"]) for entry in entries)
    raise SetupError(f"the server at {server.base_url} serves {served}, {wanted}: give that name with --model")


def takes_token_ids(server: Server, model: str, prompt: Sequence[int]) -> bool:
    """Try it: True when /v1/completions takes `prompt` as ids, says that it did, and returns ids."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    body = {"prompt": list(prompt), **_sampling(model, params), "logprobs": 0, "return_token_ids": True}
    try:
        choices = server.post("/completions", body | {"top_k": 0, "ignore_eos": True, "stop_token_ids": []}).get(
            "choices"
        )
    except Refused:
        return False
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return choice.get("prompt_token_ids") == list(prompt) and _ids(choice.get("token_ids")) is not None


def takes_extras(server: Server, model: str) -> bool:
    """Try a chat request: True when the server takes parameters beyond OpenAI's. SetupError when it takes no chat."""
    messages = [{"role": "user", "content": "Say yes."}]
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=1, max_tokens=1)
    try:
        server.post("/chat/completions", chat_body(model, messages, params, extras=True))
        return True
    except Refused:
        _ask(server, "/chat/completions", chat_body(model, messages, params, extras=False))
        return False


def _sampling(model: str, params: SamplingParams) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        # Servers want a seed that fits a signed 64-bit integer.
        "seed": params.seed & _SEED_MASK,
    }


def _ask(server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return server.post(path, body)
    except Refused as error:
        raise SetupError(f"the server at {server.base_url} refuses a request ({error.status}: {error})") from None


def _choice(answer: Mapping[str, Any], model: str) -> dict[str, Any]:
    """The only choice of an answer. SetupError when it came from another model, or there is none."""
    if answer.get("model") not in (model, None):
        raise SetupError(f"the server answers with {answer['model']}, not {model}: start the run anew")
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise SetupError(f"the server's answer for {model} holds no completion: check what it serves")
    return choices[0]


def _stop_reason(choice: Mapping[str, Any]) -> StopReason:
    return "length" if choice.get("finish_reason") == "length" else "stop"


def _ids(value: Any) -> tuple[int, ...] | None:
    """A JSON value as token ids, None when it is something else."""
    return tuple(value) if isinstance(value, list) and all(isinstance(item, int) for item in value) else None
