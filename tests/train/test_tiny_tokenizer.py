"""The demo's tokenizer and chat template: lossless, short on episodes, and in its template's behaviour Qwen3.5's."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError

from shared.chat import TokenizerCodec
from shared.data.toy import toy_names, toy_questions
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS, TOOLS, budget_line
from tests.tokenizers import template
from train.tiny_tokenizer import SPECIAL_TOKENS, TEXT_TOKENS, build_tokenizer, phrases
from train.traces import PLANS, turn_text

CASES = json.loads((Path(__file__).parent / "cases" / "chat_template.json").read_text(encoding="utf-8"))
TOKENIZER = build_tokenizer()
CODEC = TokenizerCodec(TOKENIZER)


def render(messages: list[dict[str, Any]], chat_template: str | None = None, **options: Any) -> str:
    text: str = TOKENIZER.apply_chat_template(messages, chat_template=chat_template, tokenize=False, **options)
    return text


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}, {"enable_thinking": True}], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["note"])
def test_template_agrees_with_the_one_of_small_qwen_models(case: dict[str, Any], options: dict[str, Any]) -> None:
    options = {"add_generation_prompt": True, **options}
    oracle = template("qwen3_5_nothink")
    if case.get("refused"):
        for chat_template in (None, oracle):
            with pytest.raises(TemplateError):
                render(case["messages"], chat_template, **options)
        return
    assert render(case["messages"], **options) == render(case["messages"], oracle, **options)


def test_template_refuses_function_definitions() -> None:
    with pytest.raises(TemplateError, match="no function definitions"):
        render([{"role": "user", "content": "q"}], tools=[{"type": "function", "function": {"name": "f"}}])


@given(st.text())
def test_no_text_is_lost(text: str) -> None:
    assert CODEC.decode(CODEC.encode_text(text)) == text


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, *TEXT_TOKENS, "a", "\n", "<", "|>"]), max_size=8))
def test_content_never_becomes_a_control_token(parts: list[str]) -> None:
    text = "".join(parts)
    ids = CODEC.encode_text(text)
    assert not set(ids) & set(TOKENIZER.added_tokens_decoder)
    assert CODEC.decode(ids) == text


def test_control_tokens_come_last_and_the_template_ends_turns() -> None:
    size = len(TOKENIZER)
    controls = [TOKENIZER.convert_tokens_to_ids(token) for token in (*SPECIAL_TOKENS, *TEXT_TOKENS)]
    assert controls == list(range(size - len(controls), size))
    assert size < 600
    ends = TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert CODEC.stop_ids == tuple(ends)
    assert CODEC.opens_think


def test_the_prompt_and_the_skeletons_are_single_pieces() -> None:
    # The prompt talks about think blocks; a codec cuts content at each such mark.
    assert len(CODEC.encode_text(EXEC_PLAN_TOOL_INSTRUCTIONS)) == 1 + 2
    assert len(CODEC.encode_text(f"\n{budget_line(3)}")) == 1
    assert set(PLANS) <= set(TOOLS)
    for tool in PLANS:
        arguments = {TOOLS[tool].params[0].name: ""} if TOOLS[tool].params else {}
        ids = CODEC.turn_ids(turn_text(tool, **arguments))
        assert len(ids) <= 5, TOKENIZER.convert_ids_to_tokens(ids)


def test_names_are_spelt_and_numbers_are_not() -> None:
    pieces = set(phrases())
    for split in ("train", "heldout"):
        for first, second in toy_names(split):  # type: ignore[arg-type]
            assert first + second not in pieces
            assert [CODEC.decode([i]) for i in CODEC.encode_text(first + second)] == [first, second]
    assert all(len(CODEC.encode_text(str(number))) == 1 for number in range(100))


def test_a_question_is_spelt_the_same_way_wherever_its_names_stand() -> None:
    for question in toy_questions("heldout", 12, 48, 0):
        for text in (question.text, question.gold_sql):
            pieces = [CODEC.decode([i]) for i in CODEC.encode_text(text)]
            assert question.table.name[:2] in pieces
            assert question.table.name[2:] in pieces
            assert len(pieces) <= 32


def test_ids_do_not_depend_on_the_hash_seed() -> None:
    code = "from train.tiny_tokenizer import build_tokenizer as b; print(b().backend_tokenizer.to_str())"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {TOKENIZER.backend_tokenizer.to_str() + "\n"}
