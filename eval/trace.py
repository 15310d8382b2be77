"""From an episode record to what a trace viewer shows: the turns as the model saw them, and one index entry.

The record holds what the model wrote and what each call returned. What the environment said around it (complaints
about turns without a call, the budget, the request for the final SQL) is made again by the functions that made it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eval.measures import CLASSES, Record, measure
from shared.tools.protocol import ClosingReason, budget_line, closing_message, parse_turn, problem_result

# Outcomes of a call that shows in the trace as it was written, because its arguments were not understood.
_UNREAD = "bad_call"


@dataclass(frozen=True)
class Viewer:
    """How a page shows its episodes.

    `classes` maps an outcome to its words and its tier, `tiers` a tier (the viewer's colour and mark) to its words.
    `entry` and `trace` make what is embedded of one question's records, and of one record given its limit of turns.
    `record` says what the page's run record holds.
    """

    kind: Literal["evaluation", "training"]
    classes: Mapping[str, tuple[str, str]]
    tiers: Mapping[str, str]
    entry: Callable[[Sequence[Record]], dict[str, Any]]
    trace: Callable[[Record, int], dict[str, Any]]
    record: str


def index_entry(records: Sequence[Record]) -> dict[str, Any]:
    """What the list shows and the filters look at; `records` is one question of a run, or of two runs compared."""
    first = records[0]
    entry: dict[str, Any] = {
        "id": first["question_id"],
        "sample": first["sample"],
        "db": first["db_id"],
        "difficulty": first["difficulty"],
        "question": first["question"],
        "evidence": first["evidence"],
        "gold": first["gold_sql"],
        "flags": list(first["gold"].get("flags", ())),
        "sides": [_side(record) for record in records],
    }
    return entry


def _side(record: Record) -> dict[str, Any]:
    measures = measure(record)
    return {
        "outcome": measures.outcome,
        "tier": CLASSES[measures.outcome].tier if measures.outcome is not None else "unscored",
        "status": record["status"],
        "origin": record["origin"],
        "ended": record["ended"],
        "answer": record["answer_sql"],
        "truncated": record["truncated"],
        "turns": len(record["turns"]),
        "calls": measures.calls,
        "distinct_calls": measures.distinct_calls,
        "sampled_tokens": record["sampled_tokens"],
        "total_tokens": record["total_tokens"],
        "gold_length": measures.gold_length,
        "opened": measures.opened_gold_tables,
        "literals": None
        if measures.literals is None
        else [
            measures.literals.total,
            measures.literals.seen,
            measures.literals.stated,
            measures.literals.from_nowhere,
        ],
    }


def trace(record: Record, max_turns: int) -> dict[str, Any]:
    """All that the viewer shows of one episode beside its index entry."""
    scores = record["scores"]
    verdicts = (
        [] if scores is None else [scores[key] for key in ("official", "strict", "fair", "soft_f1") if scores.get(key)]
    )
    return {
        "reason": record["reason"],
        "error": record["error"],
        "verdicts": [[verdict["rule"], verdict["score"], verdict["reason"]] for verdict in verdicts],
        "results": record.get("results"),
        "turns": _turns(record["turns"], max_turns),
    }


def _turns(turns: Sequence[Mapping[str, Any]], max_turns: int) -> list[dict[str, Any]]:
    shown = []
    last_good_sql: str | None = None
    for number, turn in enumerate(turns, 1):
        last_good_sql = last_good(turn, last_good_sql)
        asked = turns[number]["closing"] if number < len(turns) else None
        shown.append(turn_view(turn, number, max_turns, asked, last_good_sql))
    return shown


def last_good(turn: Mapping[str, Any], before: str | None) -> str | None:
    """The last query that ran without error, after this turn."""
    ran = [call["args"]["sql"] for call in turn["calls"] if call["tool"] == "run_query" and call["outcome"] == "ok"]
    return ran[-1] if ran else before


def turn_view(
    turn: Mapping[str, Any], number: int, max_turns: int, asked: bool | None, last_good_sql: str | None
) -> dict[str, Any]:
    """What a viewer shows of turn `number` (from 1) of an episode, and of what the environment said after it.

    `asked`: the model was asked for its final SQL next; None when the episode ended with this turn.
    """
    parsed = parse_turn(turn["text"])
    calls = turn["calls"]
    said_otherwise = turn["closing"] or not turn["clean"] or any(call["outcome"] == _UNREAD for call in calls)
    # The problem on record, not the parser's: under strict_format the episode refused turns that parse.
    problem = problem_result(replace(parsed, problem=turn["problem"])) if not calls and not turn["closing"] else None
    reason: ClosingReason = "turn_limit" if number >= max_turns else "failed_queries"
    return {
        "think": parsed.think,
        # A clean turn is its think block and its calls, which are shown anyway.
        "raw": turn["text"] if said_otherwise else None,
        "calls": [{key: call[key] for key in ("tool", "args", "outcome", "text")} for call in calls],
        "problem": None if problem is None else problem.text,
        "dropped": turn["dropped"],
        "tokens": turn["n_tokens"],
        "cut": turn["stop_reason"] == "length",
        "clean": turn["clean"],
        "closing": turn["closing"],
        "budget": None if asked is None else budget_line(max(max_turns - number, 0)),
        "request": closing_message(last_good_sql, reason) if asked else None,
    }
