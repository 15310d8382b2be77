"""An exported tiny model behind `vllm serve`: the same prompts as everywhere, token by token, and evaluated there."""

import json
import shutil
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval.card import is_run_of
from eval.config import EvalConfig, parse_arguments
from eval.models import model_sha256
from eval.pairing import load_run
from eval.records import read_episodes
from eval.run import evaluate
from eval.served import connect
from shared.data.example import Example
from shared.database import Database
from shared.episode import EpisodeConfig
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Sandbox
from tests.engines import vllm_server
from tests.engines.vllm_here import need_vllm

pytestmark = pytest.mark.xdist_group("vllm")

PLAN = "Goal: the names.\nNext: list_tables."
TURNS = [
    f'<think>\n{PLAN}\n</think>\n\n{{"tool": "list_tables", "args": {{}}}}',
    '<think>\nKnown: item.\n</think>\n\n{"tool": "describe_table", "args": {"table_name": "item"}}',
    '<think>\nNext: try it.\n</think>\n\n{"tool": "run_query", "args": {"sql": "SELECT name FROM item"}}',
    '<think>\nThe query is right.\n</think>\n\n{"tool": "submit_sql", "args": {"sql": "SELECT name FROM item"}}',
]
RESULTS = ["item\n[5 tool turns left before you must answer]", "CREATE TABLE item (name TEXT)", "name\nant", "-"]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    from tests.engines.tiny_export import write_export

    return write_export(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def url(export: Path) -> Iterator[str]:
    with vllm_server.serving(export, export.parent / "server.log") as address:
        yield address


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "databases" / "shop").mkdir(parents=True)
    connection = sqlite3.connect(folder / "databases" / "shop" / "shop.sqlite")
    connection.executescript("CREATE TABLE item (id INT, name TEXT); INSERT INTO item VALUES (1, 'ant'), (2, 'bee');")
    connection.close()
    questions = [{"db_id": "shop", "question": f"Question {i}?", "query": "SELECT name FROM item"} for i in range(3)]
    (folder / "questions.json").write_text(json.dumps(questions))
    return folder


def config_of(data: Path, url: str, out: Path, *more: str) -> EvalConfig:
    where = ["--questions", str(data / "questions.json"), "--databases", str(data / "databases"), "--out", str(out)]
    budget = ["--max-turns", "2", "--max-new-tokens", "12", "--max-tokens", str(vllm_server.MAX_LEN)]
    return parse_arguments(["--base-url", url, *where, *budget, *more])


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url.removesuffix("/v1") + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_every_prompt_is_the_same_in_training_evaluation_and_serving(export: Path, data: Path, url: str) -> None:
    """Turn by turn: what the served template makes of the messages is what the codec made of the ids, byte for byte."""
    served = connect(config_of(data, url, export.parent / "unused"))
    codec = served.codec
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": "Which items are there?"}]
    ids = codec.prompt_ids("Use the tools.", "Which items are there?")
    last: list[int] = []
    for turn, result in zip(TURNS, RESULTS, strict=True):
        body = {"model": served.model, "messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
        tokens = ask(url, "/tokenize", body)["tokens"]
        assert codec.decode(tokens) == codec.decode(ids)
        assert tokens == ids
        assert tokens[: len(last)] == last
        # What the chat endpoint itself feeds the model.
        chat = body | {"max_tokens": 1, "return_token_ids": True}
        assert ask(url, "/v1/chat/completions", chat)["prompt_token_ids"] == ids
        sampled = codec.turn_ids(turn)
        last = [*ids, *sampled]
        ids = [*last, *codec.result_ids(result, turn_closed=True)]
        messages += [
            {"role": "assistant", "content": turn},
            {"role": "user", "content": f"<tool_response>\n{result}\n</tool_response>"},
        ]


def test_episodes_through_the_server_are_those_of_the_model(export: Path, data: Path, url: str) -> None:
    """Same books as with any engine, and the log-probs are the model's own (transformers, float32)."""
    import torch
    from transformers import Qwen3_5ForCausalLM

    served = connect(config_of(data, url, export.parent / "unused"))
    assert served.settings["prompts"] == "token ids"
    assert served.settings["template_checked"] is True
    engine = served.load(concurrency=4)
    database = Database("shop", data / "databases" / "shop" / "shop.sqlite")
    tasks = [Task(Example(f"q{i}", "shop", f"Question {i}?", "SELECT 1", database), seed=i) for i in range(6)]
    config = EpisodeConfig(max_turns=2, max_new_tokens=20, max_tokens=vllm_server.MAX_LEN)
    with Sandbox(workers=1) as sandbox:
        episodes = run_episodes(tasks, engine, served.codec, sandbox, config, concurrency=4)
        records = [record for _, record in episodes]
    engine.close()
    model = Qwen3_5ForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
    differences = []
    for record in records:
        assert record.error is None
        assert len(record.ids) == len(record.mask) == len(record.logprobs)
        assert sum(record.mask) == sum(turn.n_tokens for turn in record.turns)
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([record.ids])).logits[0], -1)
        for i, flag in enumerate(record.mask):
            if flag:
                differences.append(abs(record.logprobs[i] - float(expected[i - 1, record.ids[i]])))
    assert sum(differences) / len(differences) < 0.06
    assert max(differences) < 0.6


@pytest.mark.parametrize(("endpoint", "path"), [("auto", "/v1/completions"), ("chat", "/v1/chat/completions")])
def test_an_evaluation_in_one_command(
    export: Path, data: Path, url: str, tmp_path: Path, endpoint: str, path: str
) -> None:
    config = config_of(data, url, tmp_path / "out", "--model", str(export), "--endpoint", endpoint)
    summary = evaluate(config)
    assert summary["n"] == 3
    settings = summary["identity"]["engine_settings"]
    assert (settings["endpoint"], settings["served_model"], settings["template_checked"]) == (path, str(export), True)
    assert summary["identity"]["versions"]["server"].startswith("0.")
    episodes = read_episodes(tmp_path / "out" / "episodes.jsonl")
    assert [len(episode["turns"]) for episode in episodes] == [3, 3, 3]
    assert {weights for episode in episodes for weights in episode["weights"]} == {f"served:{export}"}
    if endpoint == "auto":
        assert all(turn["n_tokens"] <= 12 for episode in episodes for turn in episode["turns"])


def test_the_exports_own_agent_and_card_go_with_the_evaluation(
    export: Path, data: Path, url: str, tmp_path: Path
) -> None:
    """agent.py, alone in its process, has the episodes of eval.run; and the card knows that run for its own."""
    one_at_a_time = ["--greedy", "--concurrency", "1"]
    evaluate(config_of(data, url, tmp_path / "out", "--model", str(export), *one_at_a_time))
    found = read_episodes(tmp_path / "out" / "episodes.jsonl")
    database = str(data / "databases" / "shop" / "shop.sqlite")
    budget = ["--max-turns", "2", "--max-new-tokens", "12", "--max-tokens", str(vllm_server.MAX_LEN)]
    arguments = ["--db", database, "--base-url", url, "--json", "--greedy", *budget]
    result = subprocess.run(
        [sys.executable, "-I", str(export / "agent.py"), *arguments],
        input="".join(f"{episode['question']}\n" for episode in found),
        cwd="/", env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    episodes = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(episodes) == 3, result.stderr
    for ours, theirs in zip(episodes, found, strict=True):
        assert (ours["question"], ours["answer_sql"], ours["origin"]) == (
            theirs["question"], theirs["answer_sql"], theirs["origin"],
        )  # fmt: skip
        assert [turn["text"] for turn in ours["turns"]] == [turn["text"] for turn in theirs["turns"]]
    assert is_run_of(load_run(tmp_path / "out"), model_sha256(export))


def test_what_is_served_has_to_be_what_was_named(data: Path, url: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="give that name with --model"):
        connect(config_of(data, url, tmp_path, "--model", "another"))
    longer = str(vllm_server.MAX_LEN + 1)
    with pytest.raises(SetupError, match=f"give --max-tokens {vllm_server.MAX_LEN}"):
        connect(config_of(data, url, tmp_path, "--max-tokens", longer))


def test_a_tokenizer_or_template_of_another_model_is_refused(
    export: Path, data: Path, url: str, tmp_path: Path
) -> None:
    from tests.tokenizers import byte_tokenizer, template

    byte_tokenizer(template("qwen3_5_think")).save_pretrained(tmp_path / "tokens")
    with pytest.raises(SetupError, match="tokenizes otherwise"):
        connect(config_of(data, url, tmp_path, "--tokenizer", str(tmp_path / "tokens")))
    shutil.copytree(export, tmp_path / "template", ignore=shutil.ignore_patterns("*.safetensors"))
    path = tmp_path / "template" / "chat_template.jinja"
    text = path.read_text()
    assert "system\\n' + content" in text
    path.write_text(text.replace("system\\n' + content", "system\\nBe brief. ' + content"))
    with pytest.raises(SetupError, match="chat template differs from the one given"):
        connect(config_of(data, url, tmp_path, "--tokenizer", str(path.parent)))
