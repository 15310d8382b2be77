"""What one evaluation run is: from a YAML file, the command line, or both (the command line wins)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from eval.gold import EXCLUDABLE
from shared.cli import ArgumentParser
from shared.config import StrictModel, build_config, load_yaml
from shared.engines.base import SamplingParams
from shared.episode import EpisodeConfig, Mode
from shared.errors import SetupError

EngineName = Literal["hf", "vllm", "openai", "gold", "canned"]
SCRIPTED: tuple[EngineName, ...] = ("gold", "canned")


class EvalConfig(StrictModel):
    """Every setting of `python -m eval.run`. Names are those of the options, with `_` for `-`."""

    out: Path | None = None
    model: str | None = None
    engine: EngineName = "hf"
    benchmark: str | None = None
    data: Path = Path("data")
    questions: Path | None = None
    databases: Path | None = None
    db: tuple[str, ...] = ()
    present_only: bool = False
    split: str = "test"
    phrasing: str = "verbose"
    subset: str = "all"
    limit: int | None = Field(default=None, ge=1)
    samples: int = Field(default=1, ge=1)
    vote: int | None = Field(default=None, ge=2)
    mode: Mode = "withheld"
    seed: int = 0
    turn: tuple[str, ...] = ()
    turns: Path | None = None
    temperature: float = Field(default=0.6, ge=0)
    top_p: float = Field(default=0.95, gt=0, le=1)
    top_k: int = Field(default=20, ge=0)
    greedy: bool = False
    max_turns: int = Field(default=6, ge=1)
    max_new_tokens: int = Field(default=2048, ge=1)
    max_tokens: int = Field(default=24_576, ge=1)
    max_failed_queries: int = Field(default=4, ge=1)
    max_calls_per_turn: int = Field(default=32, ge=1)
    strict_format: bool = False
    fallback: bool = True
    query_seconds: float = Field(default=30.0, gt=0)
    gold_seconds: float = Field(default=30.0, gt=0)
    audit: bool = True
    exclude: tuple[str, ...] = ()
    gold_cache: Path | None = None
    cache: bool = True
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None
    engine_option: tuple[str, ...] = ()
    base_url: str | None = None
    tokenizer: Path | None = None
    endpoint: Literal["auto", "completions", "chat"] = "auto"
    concurrency: int = Field(default=64, ge=1)
    workers: int = Field(default=2, ge=1)

    def folder(self) -> Path:
        """Where the run is written: `out`, or a folder under runs/ named after benchmark, mode and model."""
        if self.out is not None:
            return self.out
        model = Path(self.model).resolve().name if self.model else self.engine
        return Path("runs") / f"eval-{self.benchmark or 'custom'}-{self.mode}-{model}"

    def source(self) -> dict[str, Any]:
        """Where the questions and databases came from, as JSON: the settings that load them again."""
        names = {"benchmark", "data", "questions", "databases", "db", "present_only", "split", "phrasing", "subset"}
        settings = self.model_dump(include={*names, "limit", "audit", "exclude"})
        return {name: str(value.resolve()) if isinstance(value, Path) else value for name, value in settings.items()}

    def sample_count(self) -> int:
        """How many episodes a question gets."""
        return self.vote or self.samples

    def sampling(self) -> SamplingParams:
        """The sampling of every turn; `greedy` overrides the rest."""
        if self.greedy:
            return SamplingParams(temperature=0.0, top_p=1.0, top_k=0)
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    def episode(self) -> EpisodeConfig:
        """The budgets of an episode. A script has no tokenizer (it counts bytes), so no token budget binds it."""
        unbounded = self.engine in SCRIPTED
        return EpisodeConfig(
            mode=self.mode,
            max_turns=self.max_turns,
            max_new_tokens=1 << 30 if unbounded else self.max_new_tokens,
            max_tokens=1 << 31 if unbounded else self.max_tokens,
            max_failed_queries=self.max_failed_queries,
            max_calls_per_turn=self.max_calls_per_turn,
            strict_format=self.strict_format,
            fallback=self.fallback,
            sampling=self.sampling(),
        )


def add_engine_options(group: argparse._ArgumentGroup) -> None:
    """The options that say which engine answers, for every command that asks a model; see `EvalConfig`."""
    group.add_argument("--model", help="model folder, hub id that is in the local cache, or name of a served model")
    group.add_argument("--engine", choices=get_args(EngineName), help="hf (default), vllm, a server, or a script")
    group.add_argument("--base-url", metavar="URL", help="OpenAI-compatible server (implies --engine openai)")
    group.add_argument("--tokenizer", metavar="DIR", help="folder with the served model's tokenizer and template")
    group.add_argument(
        "--endpoint",
        choices=("auto", "completions", "chat"),
        help="how a server is asked (default: ids if it takes them)",
    )
    group.add_argument(
        "--engine-option", action="append", metavar="NAME=VALUE", help="argument of vllm.LLM (repeatable)"
    )
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="default: the checkpoint's")
    group.add_argument("--device", help="default: the GPU where there is one")
    group.add_argument("--turn", action="append", metavar="TEXT", help="what --engine canned says (repeatable)")
    group.add_argument("--turns", metavar="FILE", help="JSON list of raw turn texts for --engine canned")


def add_episode_options(group: argparse._ArgumentGroup) -> None:
    """Mode, sampling and the budgets of an episode, for every command that asks a model; see `EvalConfig`."""
    group.add_argument("--mode", choices=("full", "withheld"), help="schema shown, or to be explored (default)")
    group.add_argument("--seed", type=int, help="seed of all sampling (default 0)")
    group.add_argument("--temperature", type=float, help="default 0.6")
    group.add_argument("--top-p", type=float, help="default 0.95")
    group.add_argument("--top-k", type=int, help="default 20")
    group.add_argument("--greedy", action="store_true", help="always the likeliest token")
    group.add_argument("--max-turns", type=int, help="tool turns an episode (default 6)")
    group.add_argument("--max-new-tokens", type=int, help="tokens a turn (default 2048)")
    group.add_argument("--max-tokens", type=int, help="tokens an episode, prompt included (default 24576)")


def parse_arguments(argv: Sequence[str] | None = None) -> EvalConfig:
    """The config of a command line. SetupError for a value that a config would refuse as well."""
    parser = ArgumentParser(
        prog="python -m eval.run",
        description="Evaluate a model as a SQL agent. Run the same command again to resume an interrupted run.",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", type=Path, default=None, help="YAML file with any of these settings")
    what = parser.add_argument_group("what is evaluated, on what")
    add_engine_options(what)
    what.add_argument(
        "--benchmark", help="bird, bird-mini, spider, spider2, kaggledbqa, sqale, or a name for --questions"
    )
    what.add_argument("--data", help="folder that holds the benchmarks (default: data)")
    what.add_argument("--questions", help="questions JSON of your own (Spider or BIRD keys)")
    what.add_argument("--databases", help="folder with <db_id>/<db_id>.sqlite for --questions")
    what.add_argument("--db", action="append", metavar="DB_ID", help="only questions on this database (repeatable)")
    what.add_argument("--present-only", action="store_true", help="leave out questions whose database is not there")
    what.add_argument("--split", help="split of sqale (default test)")
    what.add_argument("--phrasing", help="phrasing of sqale's questions (default verbose)")
    what.add_argument("--subset", help="of spider2: all (default), or guess87, which is our guess at a published 87")
    what.add_argument("--limit", type=int, help="only the first N questions")
    what.add_argument("--out", help="output folder: new, empty, or this run unfinished (default: runs/eval-…)")
    how = parser.add_argument_group("sampling and budgets")
    add_episode_options(how)
    how.add_argument("--samples", type=int, metavar="K", help="episodes a question; scores are means over them")
    how.add_argument("--vote", type=int, metavar="K", help="K samples, and the score of a vote among their results")
    how.add_argument("--max-failed-queries", type=int, help="failed queries in a row before the end (default 4)")
    how.add_argument("--max-calls-per-turn", type=int, help="tool calls a turn (default 32)")
    how.add_argument("--strict-format", action="store_true", help="refuse turns with anything beside calls")
    how.add_argument("--no-fallback", dest="fallback", action="store_false", help="no answer from the last good query")
    how.add_argument("--query-seconds", type=float, help="time limit of the scored query (default 30)")
    how.add_argument("--gold-seconds", type=float, help="time limit of a gold query (default 30)")
    golds = parser.add_argument_group("gold queries")
    golds.add_argument("--no-audit", dest="audit", action="store_false", help="run each gold once, look for nothing")
    golds.add_argument(
        "--exclude", action="append", metavar="FLAG", help=f"also no verdict from: {', '.join(EXCLUDABLE)} (repeatable)"
    )
    golds.add_argument(
        "--gold-cache", metavar="DIR", help="where gold results are kept (default ~/.cache/execplan/gold)"
    )
    golds.add_argument("--no-cache", dest="cache", action="store_false", help="neither read nor keep gold results")
    where = parser.add_argument_group("resources")
    where.add_argument("--concurrency", type=int, help="episodes in flight (default 64)")
    where.add_argument("--workers", type=int, help="processes that execute SQL (default 2)")
    given = vars(parser.parse_args(argv))
    config_file = given.pop("config")
    data: dict[str, Any] = load_yaml(config_file) if config_file is not None else {}
    data |= given
    if data.get("base_url") is not None:
        data.setdefault("engine", "openai")
    config = build_config(data, EvalConfig, str(config_file or "command line"))
    if config.vote is not None and config.samples not in (1, config.vote):
        raise SetupError(f"--vote {config.vote} takes {config.vote} samples: leave out --samples")
    if unknown := [flag for flag in config.exclude if flag not in EXCLUDABLE]:
        raise SetupError(f"--exclude {unknown[0]} names no flag of a gold: one of {', '.join(EXCLUDABLE)}")
    return config
