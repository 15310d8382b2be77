"""Traces to imitate: episodes that an oracle plays on toy questions, with faults on purpose.

The oracle knows the database, but acts in one of four ways, drawn for each trace:

- careful: lists the tables, describes the one it needs, answers;
- hasty: lists the tables, then guesses the columns' suffix;
- blind: answers at once with the names of the question, which no database has;
- bold: tries such a query first, then goes on as careful or hasty.

A share of the answers is a query of another kind than was asked. So a model that imitates the traces well is right in
a quarter of its episodes; which of the four ways pays, and which query, is left for GRPO to find out.

Every trace goes through `shared.episode`, with real tools: its tokens are those that a rollout would have.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from pydantic import model_validator

from shared.chat import ChatCodec
from shared.config import StrictModel
from shared.data.example import Example
from shared.data.toy import SUFFIXES, ToyQuestion
from shared.engines.base import Completion
from shared.episode import Episode, EpisodeConfig
from shared.sql.sandbox import Sandbox
from shared.tools.executor import ToolExecutor
from train.config import Share

PLANS: Mapping[str, str] = MappingProxyType(
    {
        "list_tables": "Next: list the tables.",
        "describe_table": "Next: read the columns.",
        "run_query": "Next: try a query.",
        "submit_sql": "Next: answer.",
    }
)


class TraceMix(StrictModel):
    """Shares of the four ways (on any scale, at least one above 0), of answers of another kind, and of checked ones.

    wrong: share of the answers that are a query of another kind than was asked. check: share of the traces that read
    the columns and then run their query before they submit it.
    """

    careful: Share = 0.25
    hasty: Share = 0.4
    blind: Share = 0.2
    bold: Share = 0.15
    wrong: Share = 0.2
    check: Share = 0.0

    @model_validator(mode="after")
    def _some_way(self) -> Self:
        if self.careful + self.hasty == 0 and (self.bold or not self.blind):
            raise ValueError("careful and hasty are both 0: the oracle has no way to go")
        return self


@dataclass(frozen=True)
class Trace:
    """Token ids of one episode, and a mask of equal length that is 1 on the oracle's tokens."""

    ids: tuple[int, ...]
    mask: tuple[int, ...]


def turn_text(tool: str, **args: Any) -> str:
    """One assistant turn: the short plan that goes with the tool, then the call."""
    return f"<think>\n{PLANS[tool]}\n</think>\n\n{json.dumps({'tool': tool, 'args': args})}"


def oracle_turns(question: ToyQuestion, rng: random.Random, mix: TraceMix) -> list[str]:
    """The texts of the oracle's turns. The last one submits."""
    database = question.database
    kind = question.kind
    if rng.random() < mix.wrong:
        kind = rng.choice([other for other in question.table.kinds if other != kind])
    way = rng.choices(("careful", "hasty", "blind", "bold"), (mix.careful, mix.hasty, mix.blind, mix.bold))[0]
    if way == "blind":
        return [turn_text("submit_sql", sql=question.sql("", "", kind))]
    turns = []
    if way == "bold":
        turns.append(turn_text("run_query", sql=question.sql("", "", kind)))
        way = rng.choices(("careful", "hasty"), (mix.careful, mix.hasty))[0]
    turns.append(turn_text("list_tables"))
    if way == "hasty":
        return [*turns, turn_text("submit_sql", sql=question.sql(database.table_suffix, rng.choice(SUFFIXES), kind))]
    sql = question.sql(database.table_suffix, database.column_suffix, kind)
    turns.append(turn_text("describe_table", table_name=question.table.name + database.table_suffix))
    if rng.random() < mix.check:
        turns.append(turn_text("run_query", sql=sql))
    return [*turns, turn_text("submit_sql", sql=sql)]


def play(example: Example, turns: Sequence[str], codec: ChatCodec, sandbox: Sandbox, config: EpisodeConfig) -> Trace:
    """Run an episode in which the assistant says `turns`; whatever they leave open is not part of the trace."""
    episode = Episode(example, ToolExecutor(example.database, sandbox), codec, config)
    for text in turns:
        request = episode.next_request()
        if request is None:
            break
        ids = tuple(codec.turn_ids(text))
        episode.accept(Completion(request.request_id, ids, (0.0,) * len(ids), "stop", "oracle"))
    return Trace(tuple(episode.ids), tuple(episode.mask))


def oracle_traces(
    questions: Sequence[ToyQuestion],
    examples: Sequence[Example],
    codec: ChatCodec,
    sandbox: Sandbox,
    mix: TraceMix,
    seed: int,
) -> Iterator[Trace]:
    """One trace a question, in order: a pure function of the questions, the mix and the seed."""
    config = EpisodeConfig()
    for question, example in zip(questions, examples, strict=True):
        rng = random.Random(f"{seed}/{question.question_id}")
        yield play(example, oracle_turns(question, rng, mix), codec, sandbox, config)
