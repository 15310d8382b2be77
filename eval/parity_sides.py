"""The sides of a parity check, each one engine start: ordinary runs in every mode, then the same tokens scored.

`synced` and `again` are engines into which the checkpoint's weights were loaded as training loads them; `export` is
loaded from the exported folder. All of them score what `synced` sampled, token by token.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from eval.benchmarks import load_benchmark
from eval.config import EvalConfig
from eval.engines import Prepared, prepare_engine
from eval.identity import run_identity
from eval.models import model_sha256
from eval.records import SUMMARY, Key, episode_key, read_json, to_line, write_json
from eval.run import evaluate
from shared.engines.base import Completion, Engine, Request
from shared.episode import EpisodeRecord, Mode
from shared.errors import SetupError

Side = Literal["synced", "again", "export"]
SIDES: tuple[Side, ...] = get_args(Side)


@dataclass(frozen=True)
class ParityPlan:
    """What is held against what. `evaluation` has the export as its model; its mode and output folder don't count."""

    checkpoint: Path
    export: Path
    base: Path | None
    modes: tuple[Mode, ...]
    out: Path
    evaluation: EvalConfig

    def run_folder(self, side: Side, mode: Mode) -> Path:
        """The run folder of one side in one mode."""
        return self.out / f"{side}-{mode}"

    def tokens_file(self, side: Side, mode: Mode) -> Path:
        """A line an episode of that run: its ids, which of them were sampled, the sampler's log-probs."""
        return self.out / f"{side}-{mode}.tokens.jsonl"

    def scores_file(self, side: Side, mode: Mode) -> Path:
        """What that side says of the tokens that `synced` sampled in that mode."""
        return self.out / f"{side}-{mode}.logprobs.json"

    def config(self, side: Side, mode: Mode) -> EvalConfig:
        """The run's settings."""
        model = self.export if side == "export" else self.checkpoint
        update = {"mode": mode, "out": self.run_folder(side, mode), "model": str(model)}
        return self.evaluation.model_copy(update=update)

    def engine_folder(self, side: Side) -> Path:
        """The folder that the side's engine is built from."""
        return self.export if side == "export" or self.base is None else self.base


# What a text model and the conditional model around it say differently, and what no layer reads.
_OWN_SETTINGS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}


def different_settings(checkpoint: Path, export: Path) -> list[str]:
    """Settings of the language model that both configurations give, and give differently."""
    ours, theirs = (_text_config(folder) for folder in (checkpoint, export))
    return sorted(key for key in ours.keys() & theirs.keys() - _OWN_SETTINGS if ours[key] != theirs[key])


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    return config if not isinstance(text, dict) else {**config, **text}


def prepare_side(plan: ParityPlan, side: Side) -> Prepared:
    """The side's engine, not loaded yet. SetupError for anything that is missing."""
    config = plan.config(side, plan.modes[0])
    if side == "export":
        return prepare_engine(config)
    built = prepare_engine(config.model_copy(update={"model": str(plan.engine_folder(side))}))
    sha256 = hashlib.sha256(f"{built.sha256}:{model_sha256(plan.checkpoint)}".encode()).hexdigest()

    def load() -> Engine:
        from shared.engines.checkpoint_weights import sync_hf, sync_vllm
        from shared.engines.hf import HFEngine

        engine: Any = built.load()
        engine.weights = lambda: sha256[:16]
        (sync_hf if isinstance(engine, HFEngine) else sync_vllm)(engine, plan.checkpoint)
        loaded: Engine = engine
        return loaded

    return dataclasses.replace(built, sha256=sha256, load=load, description=f"loading {plan.checkpoint} as a sync does")


class _Kept:
    """One engine for several runs: loaded when first asked, and not closed by a run."""

    def __init__(self, prepared: Prepared):
        self._load = prepared.load
        self._engine: Engine | None = None

    @property
    def engine(self) -> Any:
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    @property
    def batches_by_itself(self) -> bool:
        return bool(self.engine.batches_by_itself)

    def add(self, request: Request) -> None:
        self.engine.add(request)

    def step(self) -> list[Completion]:
        done: list[Completion] = self.engine.step()
        return done

    def has_work(self) -> bool:
        return bool(self.engine.has_work())

    def end_session(self, session: str) -> None:
        self.engine.end_session(session)

    def close(self) -> None:
        """The run is over, the engine is not."""

    def shut(self) -> None:
        if self._engine is not None:
            self._engine.close()


def run_side(plan: ParityPlan, side: Side) -> None:
    """Every run of the side that is not finished yet, and what it says of the tokens of `synced`.

    SetupError when a folder holds something else.
    """
    prepared = prepare_side(plan, side)
    kept = _Kept(prepared)

    def load() -> Engine:
        _ = kept.engine  # before the first question, like any run
        return kept

    shared = dataclasses.replace(prepared, load=load)
    try:
        for mode in plan.modes:
            _run(plan, side, mode, shared)
        for mode in plan.modes:
            _score(plan, side, mode, kept)
    finally:
        kept.shut()


def _run(plan: ParityPlan, side: Side, mode: Mode, prepared: Prepared) -> None:
    config, tokens = plan.config(side, mode), plan.tokens_file(side, mode)
    if finished(config, prepared):
        return
    plan.out.mkdir(parents=True, exist_ok=True)
    with open(tokens, "a", encoding="ascii") as file:
        file.write("\n")  # ends a line that a killed run left open

        def keep(sample: int, episode: EpisodeRecord) -> None:
            line = {"question_id": episode.question_id, "sample": sample, "ids": episode.ids, "mask": episode.mask}
            file.write(to_line(line | {"logprobs": episode.logprobs}))
            file.flush()

        evaluate(config, prepared, keep)


def finished(config: EvalConfig, prepared: Prepared) -> bool:
    """Whether the run is there. SetupError when its folder holds a finished run with other settings."""
    folder = config.folder()
    if not (folder / SUMMARY).is_file():
        return False
    questions = load_benchmark(config)
    identity = run_identity(config, questions.benchmark, questions.examples, prepared)
    known = read_json(folder / SUMMARY)["identity"]
    if differing := sorted(key for key, value in json.loads(json.dumps(identity)).items() if known.get(key) != value):
        raise SetupError(
            f"{folder} holds a finished run that differs in {', '.join(differing)}: give another --out, or delete it"
        )
    return True


def read_tokens(path: Path) -> dict[Key, dict[str, Any]]:
    """The episodes of a tokens file; of an episode that was begun twice, the last one."""
    found: dict[Key, dict[str, Any]] = {}
    for line in path.read_text(encoding="ascii").split("\n"):
        try:
            episode = json.loads(line)
            found[episode_key(episode)] = episode
        except (ValueError, KeyError):
            continue  # empty, or cut by a kill: then the run has repeated the episode
    return found


def _score(plan: ParityPlan, side: Side, mode: Mode, kept: _Kept) -> None:
    """Write what the side says of each token that `synced` sampled, unless it is there."""
    path, source = plan.scores_file(side, mode), plan.tokens_file("synced", mode)
    digest = hashlib.sha256(source.read_bytes() + prepared_weights(plan, side, mode).encode()).hexdigest()
    if path.is_file() and read_json(path)["of"] == digest:
        return
    from shared.engines.forced import forced_logprobs

    episodes = [episode for episode in read_tokens(source).values() if len(episode["ids"]) > 1]
    found = forced_logprobs(kept.engine, [episode["ids"] for episode in episodes])
    write_json(path, {"of": digest, "episodes": list(_sampled_only(episodes, found))})


def _sampled_only(episodes: Iterable[dict[str, Any]], found: Iterable[list[float]]) -> Iterable[dict[str, Any]]:
    for episode, logprobs in zip(episodes, found, strict=True):
        scored = zip(logprobs, episode["mask"][1:], strict=False)  # vLLM may lack the last one
        yield {
            "question_id": episode["question_id"],
            "sample": episode["sample"],
            "logprobs": [logprob for logprob, sampled in scored if sampled],
        }


def prepared_weights(plan: ParityPlan, side: Side, mode: Mode) -> str:
    """The identity of the weights that a finished run was made with."""
    return str(read_json(plan.run_folder(side, mode) / SUMMARY)["identity"]["model_sha256"])
