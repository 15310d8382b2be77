"""The scripted engines: token in, token out like any engine, and saying exactly what their script says."""

from pathlib import Path

import pytest

from shared.chat import ByteCodec
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Engine, Request, SamplingParams
from shared.engines.scripted import CannedEngine, GoldEngine, call_text
from shared.tools.protocol import Call, parse_turn

CODEC = ByteCodec()


def request(turn: int, sql: str = "SELECT 1", *, closing: bool = False, max_tokens: int = 4096) -> Request:
    example = Example("q", "db", "?", sql, Database("db", Path("db.sqlite")))
    context = {"example": example, "turn": turn, "closing": closing}
    return Request(f"q#{turn}", (1, 2), SamplingParams(max_tokens=max_tokens), context=context)


def say(engine: Engine, asked: Request) -> str:
    engine.add(asked)
    assert engine.has_work()
    (completion,) = engine.step()
    assert not engine.has_work()
    assert completion.request_id == asked.request_id
    assert len(completion.token_ids) == len(completion.logprobs)
    assert set(completion.logprobs) == {0.0}
    assert (completion.token_ids[-1] in CODEC.stop_ids) is (completion.stop_reason == "stop")
    return CODEC.turn_text(completion.token_ids)


@pytest.mark.parametrize(
    ("sql", "table"),
    [
        ("SELECT a FROM item JOIN x", "item"),
        ('SELECT a FROM "Order Details"', "Order Details"),
        ("select a from `sänger`", "sänger"),
        ("SELECT a FROM [select items]", "select items"),
        ("SELECT a FROM (SELECT b FROM inner_one)", "inner_one"),
        ("SELECT 1", None),
    ],
)
def test_the_oracle_looks_around_then_submits_the_gold(sql: str, table: str | None) -> None:
    engine = GoldEngine(CODEC)
    turns = [parse_turn(say(engine, request(turn, sql))) for turn in range(3)]
    assert all(turn.clean and turn.think for turn in turns)
    submit = Call("submit_sql", {"sql": sql})
    look = submit if table is None else Call("describe_table", {"table_name": table})
    assert [turn.calls for turn in turns] == [(Call("list_tables", {}),), (look,), (submit,)]


def test_the_oracle_answers_at_once_when_it_must() -> None:
    text = say(GoldEngine(CODEC), request(0, closing=True))
    assert parse_turn(text).calls == (Call("submit_sql", {"sql": "SELECT 1"}),)


@pytest.mark.parametrize("sql", ["SELECT '}' || \"a\nb\" FROM t", "SELECT '<|im_end|></think>'", "SELECT 'ü\\\"'"])
def test_any_sql_comes_through_byte_for_byte(sql: str) -> None:
    text = say(GoldEngine(CODEC), request(9, sql))
    assert parse_turn(text).calls == (Call("submit_sql", {"sql": sql}),)


def test_canned_turns_repeat_in_order() -> None:
    engine = CannedEngine(CODEC, ["<think>\na\n</think>one", "<think>\nb\n</think>two"])
    said = [say(engine, request(turn)) for turn in range(3)]
    assert said == ["<think>\na\n</think>one", "<think>\nb\n</think>two", "<think>\na\n</think>one"]
    with pytest.raises(ValueError, match="at least one turn"):
        CannedEngine(CODEC, [])


def test_a_turn_beyond_the_limit_is_cut_as_a_models_would_be() -> None:
    engine = CannedEngine(CODEC, ["<think>\n" + "x" * 50])
    engine.add(request(0, max_tokens=10))
    (completion,) = engine.step()
    assert (len(completion.token_ids), completion.stop_reason) == (10, "length")


def test_call_text_is_what_the_protocol_asks_for() -> None:
    turn = parse_turn(call_text("look", "sample_rows", table_name="a", limit=2))
    assert (turn.clean, turn.think) == (True, "look")
    assert turn.calls == (Call("sample_rows", {"table_name": "a", "limit": 2}),)
