"""Ask a model a question about a SQLite database, with the protocol it was trained on.

    python agent.py --db shop.sqlite "How many items cost more than 10?"
    python agent.py --db shop.sqlite --base-url http://localhost:8000/v1 "How many items cost more than 10?"

The model is the one in whose folder agent.py lies, run by vLLM in this process (pip install vllm); or that of an
OpenAI-compatible server, such as `vllm serve` starts, for which Python alone is enough. With transformers installed, a
server that takes token ids gets those, otherwise messages. OPENAI_API_KEY, where set, goes to the server.

The model looks around the database with tools and then answers with one query. Turns, tool results, final SQL and its
rows are printed as they come. What the model writes runs in a process of its own that can only read, and is ended
when it takes too long. Episode, prompt, parser, tools, sandbox and engines are those of training and evaluation.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eval.models import check_context, check_model_folder
from eval.served import connect
from shared.chat import ChatCodec, TokenizerCodec
from shared.cli import ArgumentParser, run_main
from shared.data.example import Example
from shared.database import Database
from shared.engines.base import Completion, Engine, Request, SamplingParams
from shared.engines.weight_files import refuse_damaged
from shared.episode import EpisodeConfig, EpisodeRecord
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.sandbox import Limits, Sandbox
from shared.text import plain
from shared.tools.executor import ToolExecutor
from shared.tools.rows import render_rows

_CELL_CHARACTERS = 200
# vLLM's engine wants a seed of 31 bits; the requests' own seeds are what counts.
_ENGINE_SEED = 0x7FFFFFFF


@dataclass(frozen=True)
class Agent:
    """An engine that is ready to be loaded, and what an episode looks like in its tokens."""

    codec: ChatCodec
    episode: EpisodeConfig
    load: Callable[[], Engine]
    how: str


@dataclass(frozen=True)
class ServerSettings:
    """`eval.served.Wanted`: which server, and how to ask it."""

    base_url: str
    model: str | None
    tokenizer: Path | None
    endpoint: str
    max_tokens: int


class Watched:
    """An engine that shows what passes: the environment's words before a turn, and the turn."""

    def __init__(self, engine: Engine, codec: ChatCodec, show: Callable[[str, str], None]) -> None:
        """`show` gets a heading and a text. One episode at a time."""
        self._engine, self._codec, self._show = engine, codec, show
        self._turn, self._seen = 0, 0

    @property
    def batches_by_itself(self) -> bool:
        """As the engine does."""
        return self._engine.batches_by_itself

    def add(self, request: Request) -> None:
        """Show what the prompt has got since the last turn, and hand the request on."""
        texts, turn = self._codec.texts, int(request.context["turn"])
        if turn > 0:
            said = self._codec.decode(request.prompt_ids[self._seen :])
            said = said.removeprefix(texts.turn_end).removeprefix(texts.result).removesuffix(texts.reopening)
            self._show("results", said)
        self._turn, self._seen = turn + 1, len(request.prompt_ids)
        self._engine.add(request)

    def step(self) -> list[Completion]:
        """Show each turn that has been sampled."""
        done = self._engine.step()
        for completion in done:
            self._seen += len(completion.token_ids)
            cut = ", cut by a token limit" if completion.stop_reason == "length" else ""
            heading = f"turn {self._turn}: {len(completion.token_ids)} tokens{cut}"
            self._show(heading, self._codec.turn_text(completion.token_ids))
        return done

    def has_work(self) -> bool:
        """As the engine says."""
        return self._engine.has_work()

    def end_session(self, session: str) -> None:
        """Hand it on."""
        self._engine.end_session(session)

    def close(self) -> None:
        """Hand it on."""
        self._engine.close()


def parse_arguments(argv: Sequence[str] | None, home: Path | None) -> argparse.Namespace:
    """The command line; `home` is the folder of the model that the agent came with."""
    parser = ArgumentParser(prog="agent.py", description="Ask this model a question about a SQLite database.")
    parser.add_argument("question", nargs="?", help="the question; without it, one a line from standard input")
    parser.add_argument("--db", type=Path, required=True, metavar="FILE", help="SQLite database; it is only read")
    parser.add_argument("--evidence", default="", help="a hint that goes with the question")
    parser.add_argument("--rows", type=int, default=20, help="rows of the answer that are shown (default 20)")
    parser.add_argument("--query-seconds", type=float, default=30.0, help="time limit of the answer (default 30)")
    parser.add_argument("--json", action="store_true", help="print each episode as one JSON line instead")
    what = parser.add_argument_group("model")
    what.add_argument(
        "--model", help="model folder (default: the agent's own), or the name that the server of --base-url knows"
    )
    what.add_argument("--base-url", metavar="URL", help="ask an OpenAI-compatible server instead of running vLLM here")
    what.add_argument("--tokenizer", type=Path, metavar="DIR", help="the served model's folder (default: the agent's)")
    what.add_argument(
        "--endpoint",
        choices=("auto", "completions", "chat"),
        default="auto",
        help="token ids, messages, or (default) ids where server and installation allow",
    )
    what.add_argument(
        "--engine-option", action="append", default=[], metavar="NAME=VALUE", help="argument of vllm.LLM (repeatable)"
    )
    how = parser.add_argument_group("mode, sampling and budgets; the defaults are the evaluation's")
    defaults = EpisodeConfig()
    how.add_argument("--mode", choices=("full", "withheld"), default=defaults.mode, help="schema shown, or explored")
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--temperature", type=float, default=defaults.sampling.temperature, help="default %(default)s")
    how.add_argument("--top-p", type=float, default=defaults.sampling.top_p, help="default %(default)s")
    how.add_argument("--top-k", type=int, default=defaults.sampling.top_k, help="default %(default)s")
    how.add_argument("--greedy", action="store_true", help="always the likeliest token")
    for name in ("max_turns", "max_new_tokens", "max_tokens"):
        option = f"--{name.replace('_', '-')}"
        how.add_argument(option, type=int, default=getattr(defaults, name), help="default %(default)s")
    arguments = parser.parse_args(argv)
    if arguments.base_url is None and arguments.model is None:
        if home is None:
            raise SetupError("no model: give --model with a model folder, or --base-url with a server")
        arguments.model = str(home)
    if arguments.tokenizer is None and home is not None and (home / "tokenizer_config.json").is_file():
        arguments.tokenizer = home
    for name in ("rows", "max_turns", "max_new_tokens", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise SetupError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: give at least 1")
    return arguments


def episode_config(arguments: argparse.Namespace) -> EpisodeConfig:
    """Mode, budgets and sampling as the command line has them; everything else as the evaluation does."""
    sampling = SamplingParams(arguments.temperature, arguments.top_p, arguments.top_k)
    if arguments.greedy:
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0)
    return EpisodeConfig(
        mode=arguments.mode,
        max_turns=arguments.max_turns,
        max_new_tokens=arguments.max_new_tokens,
        max_tokens=arguments.max_tokens,
        sampling=sampling,
    )


def prepare(arguments: argparse.Namespace) -> Agent:
    """Check everything that can be checked before weights are loaded. SetupError says what is missing."""
    config = episode_config(arguments)
    if arguments.base_url is not None:
        return _served(arguments, config)
    folder = Path(arguments.model)
    if not folder.is_dir():
        raise SetupError(f"model {folder} is no folder: give --model with one, or --base-url with a server")
    check_model_folder(folder)
    check_context(folder, config.max_tokens)
    if importlib.util.find_spec("vllm") is None:
        raise SetupError("vllm is not installed: pip install vllm, or ask a server with --base-url http://HOST:PORT/v1")
    from shared.engines.tokenizer import load_tokenizer

    refuse_damaged(folder)
    codec = TokenizerCodec(load_tokenizer(folder))
    settings: dict[str, Any] = {"max_model_len": config.max_tokens, "seed": arguments.seed & _ENGINE_SEED}
    settings |= dict(map(_option, arguments.engine_option))

    def load() -> Engine:
        from shared.engines.vllm import VLLMEngine

        return VLLMEngine(folder, **settings)

    return Agent(codec, config, load, f"{folder} through vLLM, with token ids")


def _served(arguments: argparse.Namespace, config: EpisodeConfig) -> Agent:
    """A server: asked with token ids where a tokenizer can be loaded here, with messages otherwise."""
    if arguments.engine_option:
        raise SetupError("--engine-option is for vLLM in this process, not for --base-url")
    endpoint, tokenizer = arguments.endpoint, arguments.tokenizer
    if importlib.util.find_spec("transformers") is None:
        if endpoint == "completions":
            raise SetupError(
                "--endpoint completions sends token ids, which needs a tokenizer: pip install transformers"
            )
        endpoint, tokenizer = "chat", None
    served = connect(ServerSettings(arguments.base_url, arguments.model, tokenizer, endpoint, config.max_tokens))
    return Agent(
        served.codec,
        replace(config, max_tokens=config.max_tokens * served.bytes_per_token),
        lambda: served.load(1),
        f"{served.model} through {served.settings['endpoint']}, with {served.settings['prompts']}",
    )


def _option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON where it is, else as text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise SetupError(f"--engine-option {text} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def questions(arguments: argparse.Namespace) -> Iterator[str]:
    """The one question of the command line, or a line of standard input each, until an empty one."""
    if arguments.question is not None:
        yield arguments.question
        return
    while True:
        print("question> " if sys.stdin.isatty() else "", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def ask(
    question: str, database: Database, arguments: argparse.Namespace, agent: Agent, engine: Engine, sandbox: Sandbox
) -> bool:
    """One episode, shown as it goes. True when there is an answer and it runs."""
    example = Example("question", database.db_id, question, "", database, arguments.evidence)
    if not arguments.json:
        show("question", question)
        engine = Watched(engine, agent.codec, show)
    running = run_episodes(
        [Task(example, arguments.seed)], engine, agent.codec, sandbox, agent.episode, concurrency=1, tool_threads=1
    )
    ((_, record),) = running
    if record.error is not None:
        raise SetupError(f"a fault of the program ended the episode: {record.error.strip().splitlines()[-1]}")
    if arguments.json:
        print(json.dumps({"question": question} | record.to_json(tokens=False)), flush=True)
        return record.answer_sql is not None
    return show_answer(record, database, arguments, sandbox)


def show(heading: str, text: str) -> None:
    """A part of an episode on the terminal."""
    print(f"--- {heading}\n{plain(text).strip()}\n", flush=True)


def show_answer(record: EpisodeRecord, database: Database, arguments: argparse.Namespace, sandbox: Sandbox) -> bool:
    """The final SQL and its rows. True when it runs."""
    if record.answer_sql is None:
        show("no answer", f"the episode ended by {record.ended}")
        return False
    show(f"answer ({record.origin})", record.answer_sql)
    limits = Limits(seconds=arguments.query_seconds, max_rows=arguments.rows)
    result = sandbox.query(database, record.answer_sql, limits)
    if result.outcome != "ok":
        show(f"the answer does not run ({result.outcome})", result.message)
        return False
    more = ", more exist" if result.truncated else ""
    show(f"rows: {len(result.rows)}{more}", render_rows(result.columns, result.rows, _CELL_CHARACTERS))
    return True


def main(argv: Sequence[str] | None = None, home: Path | None = None) -> int:
    """The command line. Exit code 1 when an answer is missing or does not run."""
    arguments = parse_arguments(argv, home)
    if not arguments.db.is_file():
        raise SetupError(f"database {arguments.db} does not exist: give a SQLite file with --db")
    database = Database(arguments.db.stem, path=arguments.db)
    with Sandbox(workers=1) as sandbox:
        ToolExecutor(database, sandbox).ddl()  # a file that is no database is refused here
        agent = prepare(arguments)
        if not arguments.json:
            print(f"asking {agent.how}\n", flush=True)
        engine = agent.load()
        try:
            outcomes = [ask(question, database, arguments, agent, engine, sandbox) for question in questions(arguments)]
        finally:
            engine.close()
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    run_main(main)
