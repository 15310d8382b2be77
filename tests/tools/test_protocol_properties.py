"""Properties of the parser: it never raises, finds every call as written, invents none, and is linear in the text."""

import json
import string
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.tools.protocol import TOOLS, BadCall, Call, ParsedTurn, ToolResult, parse_final, parse_turn, render_results

NOISY = st.sampled_from(
    [
        *(
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            "'",
            ":",
            ",",
            "\n",
            " ",
            "<think>",
            "</think>",
            "```",
            "```sql\n",
            "/*",
            "--",
        ),
        *('{"tool":', '"args":', '{"tool": "list_tables"}', '{"tool":"submit_sql","args":{"sql":"SELECT 1"}}', "tool"),
        *("x", "1", "-", "null", "NaN", "\ud800", "\\ud800", "\ufeff", "<|im_end|>", "“", "é", "\0"),
    ]
)
NOISE = st.lists(NOISY, max_size=40).map("".join)
TEXT = st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("utf-8", "replace")) | NOISE
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tool", "args", "sql", "limit", "table_name", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def _call(tool: str, texts: tuple[str, str], limit: int) -> dict[str, Any]:
    params = TOOLS[tool].params
    names = iter(texts)
    return {"tool": tool, "args": {p.name: next(names) if p.type == "string" else limit for p in params}}


SAYABLE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
GOOD_CALL = st.builds(_call, st.sampled_from(list(TOOLS)), st.tuples(SAYABLE, SAYABLE), st.integers(1, 50))
# Prose that cannot itself be taken for JSON, a tag or the middle of one.
PROSE = st.text(st.sampled_from(string.ascii_letters + " .,:;!?()*`#\n-'\""), max_size=30)


def check(turn: ParsedTurn) -> None:
    assert (turn.problem is None) == bool(turn.calls)
    assert turn.dropped >= 0
    for call in turn.calls:
        if isinstance(call, BadCall):
            call.message.encode("utf-8")
            continue
        tool = TOOLS[call.tool]
        assert list(call.args) == [p.name for p in tool.params]
        for param in tool.params:
            value = call.args[param.name]
            assert type(value) is (str if param.type == "string" else int)
            if isinstance(value, str):
                value.encode("utf-8")
    submitted = [i for i, c in enumerate(turn.calls) if isinstance(c, Call) and c.tool == "submit_sql"]
    assert submitted in ([], [len(turn.calls) - 1])


def decodable_calls(text: str) -> list[Any]:
    """Every object that decodes at any brace of the text: a call must be one of them."""
    decoder = json.JSONDecoder()
    found = []
    for start in (i for i, character in enumerate(text) if character == "{"):
        try:
            found.append(decoder.raw_decode(text, start)[0])
        except (ValueError, RecursionError):
            continue
    return found


def written(call: Call, candidates: list[Any]) -> bool:
    """True when one of the candidates gives the call's strings exactly, and its limit or none or a higher one."""
    for value in candidates:
        if value.get("tool") != call.tool:
            continue
        args = value.get("args", {})
        same = all(args.get(k) == v for k, v in call.args.items() if isinstance(v, str))
        limits = [(args.get(k), v) for k, v in call.args.items() if isinstance(v, int)]
        if same and all(given is None or given >= used for given, used in limits):
            return True
    return False


@given(TEXT, st.integers(0, 4), st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_text(text: str, max_calls: int, strict: bool) -> None:
    turn = parse_turn(text, max_calls=max_calls, strict_format=strict)
    check(turn)
    assert len(turn.calls) <= max_calls
    candidates = decodable_calls(text)
    assert all(written(call, candidates) for call in turn.calls if isinstance(call, Call))
    final = parse_final(text)
    if final is not None:
        final.encode("utf-8")
        assert final in text or any(final == (c.get("args") or {}).get("sql") for c in candidates)


@given(JSON, st.booleans())
@settings(max_examples=400, deadline=None)
def test_any_json(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    turn = parse_turn(text)
    check(turn)
    candidates = decodable_calls(text)
    assert all(written(call, candidates) for call in turn.calls if isinstance(call, Call))


@given(st.lists(GOOD_CALL, min_size=1, max_size=5), st.lists(PROSE, min_size=6, max_size=6), PROSE, st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_call_is_found_as_written(
    calls: list[dict[str, Any]], prose: list[str], think: str, ascii_only: bool
) -> None:
    draft = json.dumps(calls[-1])
    parts = [piece for call, before in zip(calls, prose, strict=False) for piece in (before, json.dumps(call))]
    if not ascii_only:
        parts = [json.dumps(calls[i // 2], ensure_ascii=False) if i % 2 else part for i, part in enumerate(parts)]
    turn = parse_turn(f"<think>{think}{draft}</think>" + "".join(parts) + prose[-1], max_calls=5)
    check(turn)
    last = next((i for i, call in enumerate(calls) if call["tool"] == "submit_sql"), len(calls) - 1)
    assert [{"tool": c.tool, "args": c.args} for c in turn.calls if isinstance(c, Call)] == calls[: last + 1]
    assert turn.dropped == len(calls) - last - 1
    assert turn.clean == (not any(piece.strip() for piece in [*prose[: len(calls)], prose[-1]]))


@given(st.lists(GOOD_CALL, min_size=1, max_size=3), st.data())
@settings(max_examples=600, deadline=None)
def test_mutated_turns_run_nothing_that_is_not_in_the_json(calls: list[dict[str, Any]], data: st.DataObject) -> None:
    text = "<think>plan</think>\n" + "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 5)))
        text = text[:start] + data.draw(NOISY | st.just("")) + text[stop:]
    turn = parse_turn(text)
    check(turn)
    candidates = decodable_calls(text)
    assert all(written(call, candidates) for call in turn.calls if isinstance(call, Call))


@given(st.integers(0, 300), GOOD_CALL)
@settings(max_examples=200, deadline=None)
def test_a_cut_turn_runs_only_whole_calls(cut: int, call: dict[str, Any]) -> None:
    first = json.dumps({"tool": "list_tables", "args": {}})
    second = json.dumps(call)
    text = f"<think>plan</think>\n{first}\n{second}"
    kept = text[:cut]
    whole = [c for c in parse_turn(kept).calls if isinstance(c, Call)]
    assert len(whole) == (len(kept) >= len(text) - len(second) - 1) + (len(kept) == len(text))


UNIT_TEXTS = {
    "braces": "{",
    "spaced braces": "{ ",
    "quoted braces": '{"{',
    "double braces": '{"{{',
    "objects": "{}",
    "nested": '{"a":',
    "nested calls": '{"tool":',
    "nested calls on lines": '\n{"tool":',
    "half objects": '{"a": 1, ',
    "bad calls": '{"tool":"x"}',
    "python calls": "{'tool': 'x'}\n",
    "tags": "<think></think>",
    "closing tags": "</think>",
    "opening tags": "<think>",
    "end tokens": "<|im_end|>",
    "fences": "```a\n",
    "sql fences": "```sql\n",
    "comments": "/**/",
    "open comments": "/*",
    "line comments": "--\n",
    "backslashes": '"\\',
    "arrays": "[",
    "quotes": '"',
    "blank lines": "\n",
    "intents": "{tool:",
}


@pytest.mark.parametrize(
    "prefix", ["", '{"tool":"run_query","args":{"sql":"', "{tool:", "<think>", "```sql\n", '{"a": "']
)
@pytest.mark.parametrize("unit", UNIT_TEXTS.values(), ids=UNIT_TEXTS)
def test_time_is_linear_in_the_text(unit: str, prefix: str) -> None:
    def seconds(size: int) -> float:
        text = prefix + unit * (size // len(unit))
        best = float("inf")
        for _ in range(2):
            start = time.process_time()
            parse_turn(text)
            parse_final(text)
            best = min(best, time.process_time() - start)
        return best

    # 8 times the text: 8 times the time if linear, 64 if quadratic. Below 20 ms nothing is worth a complaint.
    small, large = seconds(10_000), seconds(80_000)
    assert large < max(24 * small, 0.02)


@pytest.mark.slow
def test_a_megabyte_of_each_kind_is_read() -> None:
    for unit in UNIT_TEXTS.values():
        check(parse_turn(unit * (1_000_000 // len(unit))))


@given(
    st.lists(
        st.builds(ToolResult, st.sampled_from(["list_tables", ""]), st.just("ok"), st.text(max_size=400)), max_size=6
    ),
    st.integers(0, 6),
    st.integers(0, 3000),
    st.integers(0, 2),
)
@settings(max_examples=300, deadline=None)
def test_results_fit_their_budget(results: list[ToolResult], turns_left: int, max_bytes: int, dropped: int) -> None:
    text = render_results(results, turns_left, max_bytes, dropped=dropped)
    budget = f"[{turns_left} tool turn{'' if turns_left == 1 else 's'} left before you must answer]"
    assert text.endswith(budget)
    least = len(render_results([], turns_left, dropped=dropped).encode())
    assert len(text.encode("utf-8")) <= max(max_bytes, least)
    if max_bytes >= 2600:
        assert all(r.text.encode("utf-8", "replace").decode() in text for r in results)
