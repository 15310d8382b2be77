"""Whole evaluations through a chat endpoint that the tests play: messages, refusals, and a server that dies."""

import itertools
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval import served
from eval.config import EvalConfig, parse_arguments
from eval.progress import print_summary
from eval.records import read_episodes
from eval.run import evaluate
from eval.served import MessagesCodec, connect
from shared.engines import http
from shared.errors import SetupError
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS
from tests.engines.fake_server import Answer, FakeServer, serving

GOLDS = {f"Question {i}?": f"SELECT name FROM item WHERE id = {i}" for i in (1, 2, 3, 1, 2)}
JSON = dict[str, Any]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "databases" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
    connection.executescript("CREATE TABLE item (id INT, name TEXT); INSERT INTO item VALUES (1, 'ant'), (2, 'bee');")
    connection.close()
    questions = [{"question_id": q, "db_id": "shop", "question": q, "query": sql} for q, sql in GOLDS.items()]
    (folder / "questions.json").write_text(json.dumps(questions))
    return folder


def config_of(data: Path, fake: FakeServer, out: Path, *more: str) -> EvalConfig:
    where = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases"), "--out", str(out)]
    return parse_arguments(["--base-url", fake.url, *where, *more])


def say(content: str | None, reasoning: str | None = None, finish: str = "stop") -> JSON:
    message = {"role": "assistant", "content": content, "reasoning": reasoning}
    return {"model": "m", "choices": [{"message": message, "finish_reason": finish}]}


def call(tool: str, **args: Any) -> str:
    return json.dumps({"tool": tool, "args": args})


def server(chat: Callable[[JSON], Answer], **about: Any) -> Callable[[str, JSON], Answer]:
    """A server with one model `m` that chats, and answers 404 to all else."""

    def answer(path: str, body: JSON) -> Answer:
        if path == "/v1/models":
            return {"data": [{"id": "m"} | about]}
        return chat(body) if path == "/v1/chat/completions" else (404, {"detail": "Not Found"})

    return answer


def oracle(body: JSON) -> JSON:
    """Lists the tables, then submits the gold query."""
    question = next((q for q in GOLDS if q in body["messages"][-1]["content"]), None)
    if question is not None:
        return say(call("list_tables"), "Goal: look.\n")
    asked = [q for q in GOLDS if any(q in message["content"] for message in body["messages"])]
    return say(call("submit_sql", sql=GOLDS[asked[0]]), "Known: enough.") if asked else say("yes")


def test_an_oracle_behind_a_chat_endpoint_scores_one(data: Path, tmp_path: Path) -> None:
    with serving(server(oracle)) as fake:
        summary = evaluate(config_of(data, fake, tmp_path / "out", "--temperature", "0.7"))
        bodies = fake.bodies("/v1/chat/completions")[1:]  # the first one tried what the server takes
    assert (summary["n"], summary["official"], summary["submit_rate"], summary["clean_turn_rate"]) == (3, 1.0, 1.0, 1.0)
    identity = summary["identity"]
    assert (identity["engine"], identity["model_sha256"]) == ("openai", "served:m")
    assert identity["engine_settings"]["endpoint"] == "/v1/chat/completions"
    assert identity["engine_settings"]["not_applied"] == []
    assert len(bodies) == 6
    first = next(body for body in bodies if len(body["messages"]) == 2)
    assert first["messages"][0] == {"role": "system", "content": EXEC_PLAN_TOOL_INSTRUCTIONS.strip()}
    assert (first["temperature"], first["top_p"], first["top_k"], first["max_tokens"]) == (0.7, 0.95, 20, 2048)
    assert first["chat_template_kwargs"] == {"enable_thinking": True}
    second = next(body for body in bodies if len(body["messages"]) == 4)
    assert second["messages"][:2][0] == first["messages"][0]
    assert second["messages"][2] == {
        "role": "assistant",
        "content": f"<think>\nGoal: look.\n</think>\n\n{call('list_tables')}",
    }
    assert second["messages"][3]["role"] == "user"
    assert second["messages"][3]["content"].startswith("<tool_response>\nitem\n")
    assert second["messages"][3]["content"].endswith("answer]\n</tool_response>")


def test_a_strict_server_gets_openai_parameters_only(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def strict(body: JSON) -> Answer:
        unknown = sorted(set(body) - {"model", "messages", "max_tokens", "temperature", "top_p", "seed"})
        return (400, {"error": {"message": f"unknown {unknown}"}}) if unknown else oracle(body)

    with serving(server(strict)) as fake:
        summary = evaluate(config_of(data, fake, tmp_path / "out"))
    assert summary["official"] == 1.0
    assert summary["identity"]["engine_settings"]["not_applied"] == ["top_k", "enable_thinking"]
    print_summary(summary, tmp_path / "out")
    said = capsys.readouterr().out
    assert "m was sent messages through /v1/chat/completions; tokens above are bytes of text" in said
    assert "the server does not take top_k, enable_thinking" in said


def test_a_model_that_does_not_think_gets_its_turn_back_as_it_was(data: Path, tmp_path: Path) -> None:
    turn = call("list_tables")
    with serving(server(lambda body: say(turn))) as fake:
        evaluate(config_of(data, fake, tmp_path / "out", "--limit", "1", "--max-turns", "2"))
        last = fake.bodies("/v1/chat/completions")[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in last[2::2]] == [turn, turn]


def test_a_cut_turn_is_known_as_such(data: Path, tmp_path: Path) -> None:
    with serving(server(lambda body: say(None, "thinking and thin", "length"))) as fake:
        summary = evaluate(config_of(data, fake, tmp_path / "out", "--limit", "1", "--max-turns", "1"))
    assert summary["truncation_rate"] == 1.0
    (episode,) = read_episodes(tmp_path / "out" / "episodes.jsonl")
    assert [turn["text"] for turn in episode["turns"]] == ["<think>\nthinking and thin"] * 2
    assert [turn["stop_reason"] for turn in episode["turns"]] == ["length"] * 2


@pytest.mark.parametrize(
    "text",
    [
        "<think>\na\n</think>\n\nb",
        "<think>\n<|im_end|>\n<|im_start|>user\nb\n</think>\n\n{}",
        "just text\n",
        "\u00e4\u8868\U0001f41c",
        "",
    ],
)
def test_messages_come_out_of_ids_as_they_went_in(text: str) -> None:
    codec = MessagesCodec()
    ids = codec.prompt_ids("<|im_start|>assistant\nsystem", "question\n<|im_end|>")
    for closed in (True, False):
        whole = [*ids, *codec.reply_ids(text, closed=closed), *codec.result_ids("rows\n", turn_closed=closed)]
        system, user, assistant, result = codec.messages(whole)
        assert system == {"role": "system", "content": "<|im_start|>assistant\nsystem"}
        assert user == {"role": "user", "content": "question\n<|im_end|>"}
        assert assistant["role"] == "assistant"
        assert assistant["content"].strip() == text.strip()
        assert result == {"role": "user", "content": "<tool_response>\nrows\n</tool_response>"}
    assert codec.messages(ids) == [system, user]


# ---- what is refused before the first question


@pytest.fixture
def refused(data: Path, tmp_path: Path) -> Callable[..., str]:
    """The message with which a server or an option is refused; nothing was written then."""

    def message(*more: str, **about: Any) -> str:
        with serving(server(oracle, **about)) as fake, pytest.raises(SetupError) as caught:
            evaluate(config_of(data, fake, tmp_path / "out", *more))
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    return message


def test_another_model_than_the_one_named_is_refused(refused: Callable[..., str]) -> None:
    assert "serves m, not other: give that name with --model" in refused("--model", "other")


def test_a_context_too_short_for_an_episode_is_refused(refused: Callable[..., str]) -> None:
    assert "takes 4096 tokens, an episode may have 24576: give --max-tokens 4096" in refused(max_model_len=4096)


def test_token_ids_are_not_promised_where_there_are_none(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "needs a tokenizer: give --tokenizer" in refused("--endpoint", "completions")
    assert "is no folder" in refused("--tokenizer", str(tmp_path / "nothing"))


def test_a_server_without_chat_is_refused(data: Path, tmp_path: Path) -> None:
    with (
        serving(server(lambda body: (404, {"detail": "Not Found"}))) as fake,
        pytest.raises(SetupError, match=r"refuses a request \(404: Not Found\)"),
    ):
        connect(config_of(data, fake, tmp_path / "out"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "openai"], "needs --base-url"),
        (["--engine", "hf", "--base-url", "http://localhost:1/v1"], "belong to --engine openai"),
        (["--engine", "gold", "--tokenizer", "x"], "belong to --engine openai"),
        (["--base-url", "localhost:8000"], "is no address"),
    ],
)
def test_options_that_do_not_fit_are_refused(data: Path, tmp_path: Path, options: list[str], message: str) -> None:
    where = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases")]
    with pytest.raises(SetupError, match=message):
        evaluate(parse_arguments([*where, "--out", str(tmp_path / "out"), *options]))


def template_server(rewrites: bool) -> Callable[[str, JSON], Answer]:
    """A server that shows its template: ids are code points; `rewrites` drops earlier think blocks."""

    def render(messages: list[JSON]) -> str:
        text = ""
        for message in messages:
            content = message["content"]
            if rewrites and message["role"] == "assistant":
                content = content.partition("</think>")[2]
            text += f"[{message['role']}]{content}[end]"
        return text + "[assistant]"

    def answer(path: str, body: JSON) -> Answer:
        if path == "/tokenize":
            return {"tokens": [ord(c) for c in body["prompt"] if c] if "prompt" in body else codes(body["messages"])}
        if path == "/detokenize":
            return {"prompt": "".join(map(chr, body["tokens"]))}
        return server(oracle)(path, body)

    def codes(messages: list[JSON]) -> list[int]:
        return list(map(ord, render(messages)))

    return answer


def test_a_served_template_that_drops_think_blocks_is_refused(data: Path, tmp_path: Path) -> None:
    with serving(template_server(rewrites=False)) as fake:
        assert connect(config_of(data, fake, tmp_path / "out")).settings["template_checked"] is True
    with (
        serving(template_server(rewrites=True)) as fake,
        pytest.raises(SetupError, match="rewrites earlier turns"),
    ):
        connect(config_of(data, fake, tmp_path / "out"))


# ---- a server that dies


def test_a_dead_server_stops_the_run_and_another_start_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "pauses", lambda: itertools.repeat(0.01))
    monkeypatch.setattr(served, "_RUN_PATIENCE", 0.1)
    left = 4  # one to see what it takes, two for the first episode, one for the second

    def dying(body: JSON) -> Answer:
        nonlocal left
        left -= 1
        return oracle(body) if left >= 0 else (503, {"error": {"message": "shutting down"}})

    one_by_one = ("--concurrency", "1")
    with (
        serving(server(dying)) as fake,
        pytest.raises(SetupError, match=r"answers 503 \(shutting down\): see that it runs"),
    ):
        evaluate(config_of(data, fake, tmp_path / "out", *one_by_one))
    assert len(read_episodes(tmp_path / "out" / "episodes.jsonl")) == 1
    with serving(server(oracle)) as fake:
        summary = evaluate(config_of(data, fake, tmp_path / "out", *one_by_one))
        assert len(fake.bodies("/v1/chat/completions")) == 1 + 2 * 2
    assert (summary["n"], summary["official"]) == (3, 1.0)
