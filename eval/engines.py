"""From `--engine` to a running engine, in two steps: everything that can be wrong first, the weights last."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from eval.config import EvalConfig
from eval.models import check_context, check_model_folder, model_sha256, resolve_model
from shared.chat import ByteCodec, ChatCodec, TokenizerCodec
from shared.engines.base import Engine
from shared.engines.scripted import CannedEngine, GoldEngine
from shared.engines.weight_files import refuse_damaged
from shared.episode import EpisodeConfig
from shared.errors import SetupError


@dataclass(frozen=True)
class Prepared:
    """An engine that is ready to be loaded. `sha256` is the identity of its weights, or of its script.

    `settings` is what else about the engine determines the result; it is part of the run's identity. Where the codec
    has no tokens, only bytes, `bytes_per_token` of them count as one against an episode's budget.
    """

    codec: ChatCodec
    sha256: str
    load: Callable[[], Engine]
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bytes_per_token: int = 1
    description: str = "loading the model"

    def episode(self, config: EvalConfig) -> EpisodeConfig:
        """The budgets of an episode, in this engine's tokens."""
        episode = config.episode()
        return replace(episode, max_tokens=episode.max_tokens * self.bytes_per_token)


def prepare_engine(config: EvalConfig) -> Prepared:
    """Check what the engine needs. Loads a tokenizer at most; SetupError says what is missing."""
    if config.engine != "canned" and (config.turn or config.turns is not None):
        raise SetupError("--turn and --turns belong to --engine canned")
    if config.engine != "vllm" and config.engine_option:
        raise SetupError("--engine-option belongs to --engine vllm")
    if config.engine != "openai" and (config.base_url is not None or config.tokenizer is not None):
        raise SetupError("--base-url and --tokenizer belong to --engine openai")
    if config.engine == "hf":
        return _prepare_hf(config)
    if config.engine == "vllm":
        return _prepare_vllm(config)
    if config.engine == "openai":
        return _prepare_served(config)
    if config.model is not None:
        raise SetupError(f"--engine {config.engine} follows a script and takes no --model: leave one of them out")
    codec = ByteCodec()
    if config.engine == "gold":
        return Prepared(codec, "gold", lambda: GoldEngine(codec), description="engine: gold")
    turns = canned_turns(config)
    digest = hashlib.sha256(json.dumps(turns).encode()).hexdigest()
    return Prepared(codec, digest, lambda: CannedEngine(codec, turns), description="engine: canned")


def canned_turns(config: EvalConfig) -> list[str]:
    """The texts a canned engine says: those of `--turn`, or of the `--turns` file. SetupError when there are none."""
    if config.turns is None:
        turns = list(config.turn)
    elif config.turn:
        raise SetupError("give either --turn or --turns, not both")
    else:
        turns = _read_turns(config.turns)
    if not turns:
        raise SetupError("--engine canned says nothing: give --turn TEXT, or --turns FILE with a JSON list of texts")
    return turns


def _read_turns(path: Path) -> list[str]:
    try:
        turns = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SetupError(f"turns file {path} does not exist: give a JSON list of texts") from None
    except (OSError, ValueError) as error:
        raise SetupError(f"turns file {path} is not a JSON list of texts: {error}") from None
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise SetupError(f"turns file {path} is not a JSON list of texts: mend it")
    return turns


def _model_folder(config: EvalConfig) -> Path:
    if config.model is None:
        raise SetupError("no model: give --model with a model folder, or --engine gold for the oracle")
    folder = resolve_model(config.model)
    check_model_folder(folder)
    check_context(folder, config.max_tokens)
    return folder


def _prepare_hf(config: EvalConfig) -> Prepared:
    folder = _model_folder(config)
    try:
        from shared.engines import hf_load, tokenizer
    except ImportError as error:
        raise SetupError(f"--engine hf needs torch and transformers ({error}): pip install 'execplan[eval]'") from error
    codec = TokenizerCodec(tokenizer.load_tokenizer(folder))
    refuse_damaged(folder)
    sha256 = model_sha256(folder)

    def load() -> Engine:
        return hf_load.load_engine(folder, weights=sha256[:16], dtype=config.dtype, device=config.device)

    return Prepared(codec, sha256, load, hf_load.library_versions())


def _prepare_vllm(config: EvalConfig) -> Prepared:
    if config.device is not None:
        raise SetupError("--device belongs to --engine hf: vLLM runs where it was built for")
    options = parse_options(config.engine_option)
    folder = _model_folder(config)
    from shared.engines import tokenizer, vllm

    versions = vllm.library_versions()
    codec = TokenizerCodec(tokenizer.load_tokenizer(folder))
    refuse_damaged(folder)
    sha256 = model_sha256(folder)

    def load() -> Engine:
        return vllm.VLLMEngine(
            folder,
            weights=lambda: sha256[:16],
            max_model_len=config.max_tokens,
            dtype=config.dtype,
            seed=config.seed & 0x7FFFFFFF,
            **options,
        )

    return Prepared(codec, sha256, load, versions, {"options": options})


def _prepare_served(config: EvalConfig) -> Prepared:
    """A served model's weights can't be seen: its identity is its name, and that of its tokenizer where it is here."""
    from eval.served import connect

    served = connect(config)
    sha256 = f"served:{served.model}"
    if served.tokenizer is not None:
        sha256 += f":{model_sha256(served.tokenizer)}"
    return Prepared(
        served.codec,
        sha256,
        lambda: served.load(config.concurrency),
        served.versions,
        served.settings,
        description=f"asking {served.model} through {served.settings['endpoint']}, {served.settings['prompts']}",
        bytes_per_token=served.bytes_per_token,
    )


def parse_options(options: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as a mapping, values read as YAML. SetupError for anything else."""
    parsed: dict[str, Any] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier() or name in parsed:
            raise SetupError(f"--engine-option {option} is not NAME=VALUE with a new name")
        try:
            parsed[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SetupError(f"--engine-option {option}: the value is not YAML ({error.__class__.__name__})") from None
    return parsed
