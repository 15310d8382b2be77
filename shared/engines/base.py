"""What an engine is: token ids in, sampled token ids and their log-probabilities out, request by request.

An engine never sees text, and never waits for a batch: the runner adds a request when an episode
is ready for its next turn, and calls `step` until completions come back, in any order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from shared.errors import SetupError

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` makes a request's sample independent of what else is in the batch (up to float rounding).
    """

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 20
    max_tokens: int = 2048
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One completion wanted. `context` is for scripted engines, which answer from the example, not the ids.

    `session` names the episode: requests of one session extend each other's token ids, so an engine
    may keep its cache between them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    session: str = ""
    context: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """Sampled ids (a sampled stop token included) with one log-probability each.

    `logprobs[i]` is the natural log-probability of `token_ids[i]` under the model's full softmax at
    temperature 1, before any truncation to top-k or top-p: the quantity a trainer recomputes.
    `stop_reason` is "length" when max_tokens ended it. `weights` names the weights it came from.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    weights: str = ""


def refuse_nan(completion: Completion) -> Completion:
    """The completion. SetupError when a log-probability is NaN: no answer of such a model says anything."""
    if any(logprob != logprob for logprob in completion.logprobs):
        raise SetupError(
            f"{completion.request_id}: the model's log-probabilities are NaN; its weights are damaged (NaN in them: "
            "take another checkpoint) or its dtype is too narrow for it (try float32)"
        )
    return completion


class Engine(Protocol):
    """A request-level engine."""

    @property
    def batches_by_itself(self) -> bool:
        """Whether it puts batches together as requests come, so that it is stepped while tools run.

        True for vLLM and for servers, which would only be idle meanwhile. An engine that answers False is stepped when
        no tool runs: what shares a batch, and with it every float, is then the same in every run.
        """

    def add(self, request: Request) -> None:
        """Queue one request; its sampling starts at the next `step`."""

    def step(self) -> list[Completion]:
        """Do one unit of work and return what finished in it (often nothing)."""

    def has_work(self) -> bool:
        """True while a queued or running request is unfinished."""

    def end_session(self, session: str) -> None:
        """The episode is over: whatever was cached for it may go."""

    def close(self) -> None:
        """Free what the engine holds."""
