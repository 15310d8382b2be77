"""One episode: a question, up to six tool turns, a closing turn, an answer. What happens to it is in this file.

The episode holds the token ids from the first prompt on. `next_request` says what to sample next; `accept` takes
what was sampled, runs the calls in it, and appends the ids of the result turn. Nothing a model writes raises.
"""

import hashlib
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from shared.chat import ChatCodec
from shared.data.example import Example
from shared.engines.base import Completion, Request, SamplingParams
from shared.errors import SetupError
from shared.tools.executor import ToolExecutor
from shared.tools.protocol import (
    EXEC_PLAN_TOOL_INSTRUCTIONS,
    SUBMIT,
    BadCall,
    Call,
    ClosingReason,
    ToolResult,
    closing_message,
    first_user_message,
    parse_final,
    parse_turn,
    problem_result,
    render_results,
)

Mode = Literal["full", "withheld"]
Origin = Literal["submitted", "final_text", "fallback", "none"]
Ended = Literal["submitted", "final_turn", "token_limit", "error"]


@dataclass(frozen=True)
class EpisodeConfig:
    """Budgets and switches of an episode. Token counts include the prompt in `max_tokens`, bytes are UTF-8.

    `mode` full shows the DDL with the question, withheld does not. `fallback` lets an empty or failing answer in the
    closing turn fall back to the last query that ran. `sampling.seed` and `sampling.stop_token_ids` are set by turn.
    """

    mode: Mode = "withheld"
    max_turns: int = 6
    max_new_tokens: int = 2048
    max_tokens: int = 24_576
    max_failed_queries: int = 4
    max_calls_per_turn: int = 32
    max_result_bytes: int = 24_000
    strict_format: bool = False
    fallback: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass
class CallRecord:
    """One call of a turn and what came back. `args` is empty for a call that did not parse."""

    tool: str
    args: dict[str, Any]
    outcome: str
    text: str
    seconds: float


@dataclass
class TurnRecord:
    """One sampled turn. `start` is the index of its first id; `closing` marks the turn that asks for the final SQL."""

    text: str
    start: int
    n_tokens: int
    stop_reason: str
    clean: bool
    problem: str | None
    dropped: int
    closing: bool
    calls: list[CallRecord]


@dataclass
class EpisodeRecord:
    """What is left of an episode: enough to re-score it, to show it and to train on it.

    `ids`, `mask` and `logprobs` have one entry a token: `mask` is 1 on exactly the sampled ids, `logprobs` is the
    sampler's there and 0.0 elsewhere. `error` is set when the episode ended by a fault of ours.
    """

    question_id: str
    db_id: str
    mode: Mode
    seed: int
    answer_sql: str | None
    origin: Origin
    ended: Ended
    turns: list[TurnRecord]
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    n_prompt_tokens: int
    weights: list[str]
    error: str | None = None

    @property
    def truncated(self) -> bool:
        """True when a token limit cut the episode or its last turn."""
        return self.ended == "token_limit" or (bool(self.turns) and self.turns[-1].stop_reason == "length")

    def to_json(self, *, tokens: bool = True) -> dict[str, Any]:
        """A JSON-able dict; without `tokens` the three per-token lists are left out."""
        data = asdict(self)
        if not tokens:
            for key in ("ids", "mask", "logprobs"):
                del data[key]
        return data


def turn_seed(seed: int, turn: int) -> int:
    """A 64-bit seed for one turn: depends on both numbers, and on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn}".encode()).digest()[:8], "little")


class Episode:
    """A running episode. Not thread-safe: one call at a time."""

    def __init__(
        self,
        example: Example,
        executor: ToolExecutor,
        codec: ChatCodec,
        config: EpisodeConfig,
        *,
        seed: int = 0,
        name: str = "",
    ) -> None:
        """Raises SetupError when the database cannot be read in `full` mode."""
        self.example, self.config, self.seed, self.name = example, config, seed, name or example.question_id
        self._executor, self._codec = executor, codec
        ddl = executor.ddl() if config.mode == "full" else None
        user = first_user_message(example.question, example.evidence, ddl)
        self.ids = codec.prompt_ids(EXEC_PLAN_TOOL_INSTRUCTIONS, user)
        self.mask = [0] * len(self.ids)
        self.logprobs = [0.0] * len(self.ids)
        self.n_prompt_tokens = len(self.ids)
        self.turns: list[TurnRecord] = []
        self.weights: list[str] = []
        self.answer: str | None = None
        self.origin: Origin = "none"
        self.ended: Ended | None = None
        self.error: str | None = None
        self._closing = False
        self._failed_in_a_row = 0
        self._last_good_sql: str | None = None
        if self._room() < 1:
            self.ended = "token_limit"

    def _room(self) -> int:
        return self.config.max_tokens - len(self.ids)

    # ---- what to sample next

    def next_request(self) -> Request | None:
        """The completion wanted next, or None when the episode has ended."""
        if self.ended is not None:
            return None
        turn = len(self.turns)
        sampling = self.config.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(self.config.max_new_tokens, self._room()),
            seed=turn_seed(self.seed, turn),
            stop_token_ids=self._codec.stop_ids,
        )
        context = {"example": self.example, "turn": turn, "closing": self._closing}
        return Request(f"{self.name}#{turn}", tuple(self.ids), params, session=self.name, context=context)

    # ---- what was sampled

    def accept(self, completion: Completion) -> None:
        """Append a completion and play the environment's part. Other faults of ours than SetupError end the episode."""
        try:
            self._accept(completion)
        except SetupError:
            raise
        except Exception:
            self.ended, self.error = "error", traceback.format_exc(limit=8)

    def _accept(self, completion: Completion) -> None:
        start = len(self.ids)
        self._append(completion.token_ids, sampled=True, logprobs=completion.logprobs)
        if completion.weights not in self.weights:
            self.weights.append(completion.weights)
        text = self._codec.turn_text(completion.token_ids)
        parsed = parse_turn(
            text,
            max_calls=self.config.max_calls_per_turn,
            strict_format=self.config.strict_format and not self._closing,
        )
        record = TurnRecord(
            text=text,
            start=start,
            n_tokens=len(completion.token_ids),
            stop_reason=completion.stop_reason,
            clean=parsed.clean,
            problem=parsed.problem,
            dropped=parsed.dropped,
            closing=self._closing,
            calls=[],
        )
        self.turns.append(record)
        if self._closing:
            self._finish(parse_final(text))
            return
        results = [self._run(call, record) for call in parsed.calls]
        if self.ended is not None:
            return
        if not results:
            problem = problem_result(parsed)
            results = [problem] if problem is not None else []
        self._reply(results, parsed.dropped, turn_closed=completion.stop_reason == "stop")

    def _append(self, ids: Sequence[int], *, sampled: bool, logprobs: Sequence[float] = ()) -> None:
        self.ids.extend(ids)
        self.mask.extend([int(sampled)] * len(ids))
        self.logprobs.extend(logprobs if sampled else [0.0] * len(ids))

    def _run(self, call: Call | BadCall, record: TurnRecord) -> ToolResult:
        result = self._executor.call(call)
        args = call.args if isinstance(call, Call) else {}
        record.calls.append(CallRecord(result.tool, args, result.outcome, result.text, result.seconds))
        if isinstance(call, Call) and call.tool == SUBMIT:
            self.answer, self.origin, self.ended = call.args["sql"], "submitted", "submitted"
        elif isinstance(call, Call) and call.tool == "run_query":
            if result.outcome == "ok":
                self._failed_in_a_row, self._last_good_sql = 0, call.args["sql"]
            else:
                self._failed_in_a_row += 1
        return result

    def _reply(self, results: Sequence[ToolResult], dropped: int, *, turn_closed: bool) -> None:
        """Append the result turn, cut so that it leaves room to answer; end the episode when there is none."""
        turns_left = self.config.max_turns - len(self.turns)
        reason: ClosingReason | None = None
        if turns_left <= 0:
            reason = "turn_limit"
        elif self._failed_in_a_row >= self.config.max_failed_queries:
            reason = "failed_queries"
        self._closing = reason is not None
        # A result may take half of the tokens that are left, so that the episode can go on after it.
        share = self._room() // 2
        max_bytes = self.config.max_result_bytes
        while True:
            text = render_results(results, max(turns_left, 0), max_bytes, dropped=dropped)
            if reason is not None:
                text = f"{text}\n{closing_message(self._last_good_sql, reason)}"
            ids = self._codec.result_ids(text, turn_closed=turn_closed)
            if len(ids) <= share or max_bytes < 64:
                break
            max_bytes = min(max_bytes // 2, max_bytes * share // len(ids))
        if len(ids) >= self._room():
            self.ended = "token_limit"
            return
        self._append(ids, sampled=False)

    def _finish(self, sql: str | None) -> None:
        """The closing turn's answer; an empty or failing one falls back to the last query that ran."""
        self.ended = "final_turn"
        if sql is not None:
            self.answer, self.origin = sql, "final_text"
            if not self.config.fallback or self._last_good_sql is None:
                return
            if self._executor.call(Call("run_query", {"sql": sql})).outcome == "ok":
                return
        if self.config.fallback and self._last_good_sql is not None:
            self.answer, self.origin = self._last_good_sql, "fallback"

    # ---- what is left of it

    def record(self) -> EpisodeRecord:
        """The record of an ended episode. ValueError while it is running."""
        if self.ended is None:
            raise ValueError(f"episode {self.name} has not ended")
        return EpisodeRecord(
            question_id=self.example.question_id,
            db_id=self.example.db_id,
            mode=self.config.mode,
            seed=self.seed,
            answer_sql=self.answer,
            origin=self.origin,
            ended=self.ended,
            turns=self.turns,
            ids=self.ids,
            mask=self.mask,
            logprobs=self.logprobs,
            n_prompt_tokens=self.n_prompt_tokens,
            weights=self.weights,
            error=self.error,
        )
