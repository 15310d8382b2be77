"""Engines that follow a script instead of a model: the gold oracle, and a list of canned turns.

They make every path of an episode testable without weights, and they are exact instruments: the oracle
must score 1 wherever the gold query runs, and a canned answer must score what the rule says and no more.
Both are token in, token out like any engine: a turn is text, turned into ids by the codec. A script is
certain of what it says, so every log-probability is 0.0.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shared.engines.base import Completion, Request

_FROM_TABLE = re.compile(r"""\bFROM\s+(?:"([^"]+)"|`([^`]+)`|\[([^\]]+)\]|(\w+))""", re.IGNORECASE)


class TurnCodec(Protocol):
    """What a scripted engine needs of a codec: ids of a whole assistant turn, its stop token included."""

    def turn_ids(self, text: str) -> list[int]:
        """Token ids with which a model would say `text` and end its turn."""


class ScriptedEngine:
    """Answers each request with the turn that `script(request)` returns, at the next step."""

    batches_by_itself = False

    def __init__(self, codec: TurnCodec, script: Callable[[Request], str], weights: str):
        self._codec, self._script, self._weights = codec, script, weights
        self._queue: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue.append(request)

    def step(self) -> list[Completion]:
        """Complete everything that is queued; a turn longer than `max_tokens` is cut there, as a model's is."""
        queue, self._queue = self._queue, []
        return [self._complete(request) for request in queue]

    def _complete(self, request: Request) -> Completion:
        ids = self._codec.turn_ids(self._script(request))
        cut = len(ids) > request.params.max_tokens
        ids = ids[: request.params.max_tokens]
        return Completion(
            request.request_id, tuple(ids), (0.0,) * len(ids), "length" if cut else "stop", weights=self._weights
        )

    def has_work(self) -> bool:
        """True while a request is queued."""
        return bool(self._queue)

    def end_session(self, session: str) -> None:
        """Nothing is cached."""

    def close(self) -> None:
        """Nothing is held."""


class GoldEngine(ScriptedEngine):
    """Looks around as an agent would, then submits the example's gold SQL."""

    def __init__(self, codec: TurnCodec):
        super().__init__(codec, _gold_turn, "gold")


class CannedEngine(ScriptedEngine):
    """Says `turns[turn % len(turns)]` at every episode's turn number `turn`, whatever it is asked."""

    def __init__(self, codec: TurnCodec, turns: Sequence[str]):
        if not turns:
            raise ValueError("a canned engine needs at least one turn")
        self._turns = tuple(turns)
        super().__init__(codec, self._canned_turn, "canned")

    def _canned_turn(self, request: Request) -> str:
        return self._turns[int(request.context["turn"]) % len(self._turns)]


def call_text(plan: str, tool: str, **args: Any) -> str:
    """An assistant turn as the protocol wants it: the plan as a think block, then one call object."""
    call = json.dumps({"tool": tool, "args": args}, ensure_ascii=False)
    return f"<think>\n{plan}\n</think>\n\n{call}"


def _gold_turn(request: Request) -> str:
    gold_sql = request.context["example"].gold_sql
    if not request.context["closing"]:
        turn = int(request.context["turn"])
        if turn == 0:
            return call_text("I do not know this database yet: list its tables.", "list_tables")
        match = _FROM_TABLE.search(gold_sql)
        if turn == 1 and match is not None:
            table = next(name for name in match.groups() if name)
            return call_text(f"The question is about {table}: read its columns.", "describe_table", table_name=table)
    return call_text("I have what I need: submit the query.", "submit_sql", sql=gold_sql)
