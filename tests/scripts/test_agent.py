"""agent.py, the one file, held to the harness: the same requests byte for byte, and the same answers."""

import ast
import json
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from eval.config import EvalConfig, parse_arguments
from eval.engines import prepare_engine
from shared.chat import TokenizerCodec
from shared.data.example import Example
from shared.data.toy import toy_examples
from shared.episode import EpisodeConfig
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Sandbox
from shared.tools.protocol import PROMPT_SHA256
from tests.engines.fake_server import FakeServer, serving
from tests.scripts.agent_server import ENDLESS, call, served_by, toy_script, turn
from tests.scripts.export_cases import export
from tests.tokenizers import byte_tokenizer, template
from train.export.one_file import ROOT, closure, one_file

SEED = 5
N_DATABASES, N_QUESTIONS = 5, 50
# What an episode's record may differ in: who asked, and how long it took.
_OTHER = ("question_id", "seconds")


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """agent.py in a folder that has nothing else."""
    path = tmp_path_factory.mktemp("alone") / "agent.py"
    path.write_text(one_file("eval.agent", {}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[Example]]]:
    """Generated databases with about ten questions each, all different."""
    examples = toy_examples("heldout", N_DATABASES, 2 * N_QUESTIONS, 3, tmp_path_factory.mktemp("toy"))
    different = list({example.question: example for example in examples}.values())
    groups: dict[Path, list[Example]] = {}
    for example in different[:N_QUESTIONS]:
        assert example.database.path is not None
        groups.setdefault(example.database.path, []).append(example)
    return list(groups.items())


def settings_of(group: int) -> list[str]:
    """Every second database is asked with its schema shown, the last one with room for a few turns only."""
    mode = ["--mode", "full" if group % 2 else "withheld", "--seed", str(SEED), "--temperature", "0.7"]
    return mode if group < N_DATABASES - 1 else [*mode, "--max-tokens", "2600", "--max-turns", "4"]


def golds(asked: Sequence[tuple[Path, list[Example]]]) -> dict[str, str]:
    return {example.question: example.gold_sql for _, examples in asked for example in examples}


def harness(url: str, asked: Sequence[tuple[Path, list[Example]]], *more: str) -> dict[str, dict[str, Any]]:
    """Question -> episode, asked by the evaluation's own engine and runner, several at a time."""
    found = {}
    for group, (_, examples) in enumerate(asked):
        config = parse_arguments(["--base-url", url, *settings_of(group), *more])
        prepared = prepare_engine(config)
        engine = prepared.load()
        with Sandbox(workers=2) as sandbox:
            tasks = [Task(example, SEED) for example in examples]
            running = run_episodes(tasks, engine, prepared.codec, sandbox, prepared.episode(config), concurrency=4)
            found |= {examples[index].question: record.to_json(tokens=False) for index, record in running}
        engine.close()
    return found


def stripped(record: Any) -> Any:
    """A record without what may differ."""
    if isinstance(record, dict):
        return {key: stripped(value) for key, value in record.items() if key not in _OTHER}
    return [stripped(item) for item in record] if isinstance(record, list) else record


def bodies(fake: FakeServer, path: str) -> list[str]:
    """What the server was asked, in an order that does not hang on who was faster; questions that probe it left out."""
    wanted = [json.dumps(body, sort_keys=True) for body in fake.bodies(path) if body["max_tokens"] > 1]
    return sorted(wanted)


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """The first place where two lists of requests differ, as excerpts: all of them are too much to read."""
    for one, other in zip_longest(ours, theirs, fillvalue=""):
        if one != other:
            at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
            return one[max(at - 80, 0) : at + 120], other[max(at - 80, 0) : at + 120]
    return None


def run_alone(command: Sequence[str], questions: Sequence[str] = (), timeout: float = 120) -> Any:
    """A program that gets neither this project's path nor its environment."""
    text = "".join(f"{question}\n" for question in questions)
    environment = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-I", *command],
        input=text, cwd="/", env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


def episodes(output: str) -> dict[str, dict[str, Any]]:
    records = [json.loads(line) for line in output.splitlines()]
    return {record.pop("question"): record for record in records}


def assert_same(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]]) -> None:
    assert list(map(len, (ours, theirs))) == [N_QUESTIONS] * 2
    for question, record in theirs.items():
        assert stripped(ours[question]) == stripped(record), question


def test_fifty_episodes_with_messages_are_the_harness_to_the_byte(
    agent: Path, asked: list[tuple[Path, list[Example]]]
) -> None:
    """`-S`: not even installed packages are there, so Python alone is enough."""
    with serving(served_by(toy_script(golds(asked)))) as fake:
        theirs = harness(fake.url, asked, "--endpoint", "chat")
        wanted = bodies(fake, "/v1/chat/completions")
        fake.asked.clear()
        ours: dict[str, dict[str, Any]] = {}
        for group, (path, examples) in enumerate(asked):
            command = ["-S", str(agent), "--db", str(path), "--base-url", fake.url, "--json", *settings_of(group)]
            result = run_alone(command, [example.question for example in examples])
            assert (result.stderr, result.returncode) == ("", 1)  # some episodes have no answer
            ours |= episodes(result.stdout)
        assert first_difference(bodies(fake, "/v1/chat/completions"), wanted) is None
    assert_same(ours, theirs)
    assert {record["origin"] for record in ours.values()} == {"submitted", "final_text", "fallback", "none"}


_IN_ONE_PROCESS = """
import importlib.util, io, json, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("agent", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
from eval.agent import main
for argv, questions in json.load(sys.stdin):
    sys.stdin = io.StringIO(questions)
    main(argv, Path(sys.argv[2]))
ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("shared", "eval", "train")}
strangers = [name for name, module in ours.items() if not module.__file__.startswith(sys.argv[1] + "/")]
sys.exit(f"not from the one file: {strangers}" if strangers or len(ours) < 30 else 0)
"""


def test_fifty_episodes_with_token_ids_are_the_harness_to_the_token(
    agent: Path, asked: list[tuple[Path, list[Example]]], tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer(template("qwen3_5_think"), merges=(("S", "E"), ("SE", "L")))
    tokenizer.save_pretrained(tmp_path / "model")
    with serving(served_by(toy_script(golds(asked)), TokenizerCodec(tokenizer))) as fake:
        theirs = harness(fake.url, asked, "--tokenizer", str(tmp_path / "model"))
        wanted = bodies(fake, "/v1/completions")
        fake.asked.clear()
        jobs = [
            (
                ["--db", str(path), "--base-url", fake.url, "--json", *settings_of(group)],
                "".join(f"{example.question}\n" for example in examples),
            )
            for group, (path, examples) in enumerate(asked)
        ]
        result = run_alone(["-c", _IN_ONE_PROCESS, str(agent), str(tmp_path / "model")], [json.dumps(jobs)])
        assert (result.stderr, result.returncode) == ("", 0)
        assert first_difference(bodies(fake, "/v1/completions"), wanted) is None
        assert len(wanted) > 3 * N_QUESTIONS
        assert not fake.bodies("/v1/chat/completions")
    ours = episodes(result.stdout)
    assert_same(ours, theirs)
    assert {record["ended"] for record in ours.values()} == {"submitted", "final_turn", "token_limit"}
    outcomes = {call["outcome"] for record in ours.values() for turn in record["turns"] for call in turn["calls"]}
    assert outcomes >= {"ok", "bad_call", "sql_error", "refused", "submitted"}


def test_the_defaults_are_the_evaluations() -> None:
    assert EvalConfig().episode() == EpisodeConfig()


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.executescript(
            "CREATE TABLE item (name TEXT, price REAL); INSERT INTO item VALUES ('\x1b[31mant', 12)"
        )
    connection.close()
    return path


def test_an_episode_is_shown_as_it_happens(agent: Path, shop: Path) -> None:
    sql = "SELECT name FROM item WHERE price > 10"
    turns = [turn("Try it.", call("run_query", sql=sql)), turn("Right.", call("submit_sql", sql=sql))]
    with serving(served_by(lambda question, number, closing: (turns[number], "stop"))) as fake:
        result = run_alone(["-S", str(agent), "--db", str(shop), "--base-url", fake.url, "Which are dear?"])
    assert (result.returncode, result.stderr) == (0, "")
    order = ["the-model through /v1/chat/completions", "Which are dear?", "turn 1", "Try it.", "--- results\nname\n"]
    order += ["[5 tool turns left", "turn 2", "submit_sql", f"answer (submitted)\n{sql}", "--- rows: 1\nname\n"]
    places = [result.stdout.index(text) for text in order]
    assert places == sorted(places)
    assert "\x1b" not in result.stdout


def test_hostile_sql_is_refused_there_too(agent: Path, shop: Path, tmp_path: Path) -> None:
    before, target = shop.read_bytes(), tmp_path / "stolen.sqlite"
    queries = [f"ATTACH '{target}' AS x", "DROP TABLE item", ENDLESS]
    turns = [
        *(turn("Try.", call("run_query", sql=sql)) for sql in queries),
        turn("Go.", call("submit_sql", sql=ENDLESS)),
    ]
    with serving(served_by(lambda question, number, closing: (turns[number], "stop"))) as fake:
        command = ["-S", str(agent), "--db", str(shop), "--base-url", fake.url, "--query-seconds", "0.3", "Why?"]
        result = run_alone(command)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.count("Refused: ") == 2
    assert "took longer than 5 s" in result.stdout
    assert "the answer does not run (timeout)" in result.stdout
    assert shop.read_bytes() == before
    assert not target.exists()


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """What passes for a model until something wants to load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--db", "nowhere.sqlite", "Q?"], "database nowhere.sqlite does not exist"),
        (["--db", "{agent}", "Q?"], "agent"),
        (["Q?"], "the following arguments are required: --db"),
        (["--db", "{shop}", "Q?"], "has no config.json"),
        (["--db", "{shop}", "--model", "nowhere", "Q?"], "model nowhere is no folder"),
        (["--db", "{shop}", "--model", "{model}", "Q?"], "vllm is not installed: pip install vllm, or"),
        (["--db", "{shop}", "--model", "{model}", "--max-tokens", "0", "Q?"], "--max-tokens 0: give at least 1"),
        (["--db", "{shop}", "--base-url", "localhost:1", "Q?"], "is no address"),
        (["--db", "{shop}", "--base-url", "http://localhost:1/v1", "Q?"], "cannot be reached"),
        (["--db", "{shop}", "--base-url", "http://localhost:1/v1", "--endpoint", "completions", "Q?"], "transformers"),
        (["--db", "{shop}", "--base-url", "http://localhost:1/v1", "--engine-option", "a=1", "Q?"], "--engine-option"),
    ],
)
def test_mistakes_are_one_line(agent: Path, shop: Path, model_folder: Path, arguments: list[str], message: str) -> None:
    given = [text.format(agent=agent, shop=shop, model=model_folder) for text in arguments]
    result = run_alone(["-S", str(agent), *given])
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


# ---- the file itself


def test_the_file_holds_the_projects_sources_to_the_byte(agent: Path) -> None:
    files = closure("eval.agent")
    text = agent.read_text(encoding="utf-8")
    assigned = {
        ast.literal_eval(node.targets[0].slice): ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    }
    assert assigned == {path: (ROOT / path).read_text(encoding="utf-8") for path in files}
    assert {"shared/sql/worker.py", "shared/tools/parse.py", "shared/engines/vllm.py", "eval/agent.py"} <= set(files)
    assert not [path for path in files if path.startswith("train")]


def test_an_export_carries_it_and_its_head_says_how_it_was_made(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    assert export(base, checkpoint, tmp_path / "out") == 0
    doc = ast.get_docstring(ast.parse((tmp_path / "out" / "agent.py").read_text(encoding="utf-8"))) or ""
    assert "python agent.py --db shop.sqlite" in doc
    assert "Made by execplan 0." in doc
    assert f"system prompt: sha256 {PROMPT_SHA256}" in doc


def test_nothing_of_the_file_imports_a_package_before_it_is_needed() -> None:
    """At the top of a module there is the standard library and the project; vllm_weights is for trainers alone."""
    for path in set(closure("eval.agent")) - {"shared/engines/vllm_weights.py"}:
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or (ROOT / top / "__init__.py").is_file(), f"{path}: {name}"


def test_a_module_that_cannot_be_quoted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1"\n')
    (tmp_path / "odd.py").write_text("x = '''a'''\n")
    with pytest.raises(ValueError, match=r"odd\.py holds"):
        one_file("odd", {}, tmp_path)
