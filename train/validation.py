"""How the run does on held-out questions, every n-th step: the figures that the best checkpoint is selected by.

The same seeded sample with the same sampling seeds is asked each time, so what differs is the weights alone.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from shared.chat import ChatCodec
from shared.data.example import Example, Loaded
from shared.engines.base import Engine, SamplingParams
from shared.episode import EpisodeConfig, EpisodeRecord, Mode
from shared.errors import SetupError
from shared.runner import Task, run_episodes
from shared.sql.results import official_equal
from shared.sql.sandbox import Sandbox
from train.config import TrainConfig
from train.pool import TOY_HELD_OUT
from train.rollout import Scorer, derived_number, episode_config


@dataclass(frozen=True)
class HeldOut:
    """The sample: `name` of the set, `total` questions it has, and `key`, which changes with sample and settings."""

    name: str
    examples: Sequence[Example]
    total: int
    key: str

    @property
    def description(self) -> str:
        """`BIRD dev (256 of 1,534 questions)`."""
        return f"{self.name} ({len(self.examples):,} of {self.total:,} questions)"


def load_held_out(
    config: TrainConfig, training: Sequence[Example], report: Callable[[str], None] = lambda line: None
) -> HeldOut | None:
    """The validation sample of a run, in the set's order; None with validation.every 0. `report` gets a line.

    Raises SetupError when the set cannot be read, has no question with gold SQL, or shares questions with `training`.
    """
    settings = config.validation
    if not settings.every:
        return None
    loaded = _load(config)
    known = {(example.db_id, example.question) for example in training}
    shared = [example for example in loaded.examples if (example.db_id, example.question) in known]
    if shared:
        raise SetupError(
            f"validation: {len(shared)} of its questions are in the training pool, {shared[0].question_id} for one; "
            "give a held-out set"
        )
    usable = [example for example in loaded.examples if example.gold_sql.strip()]
    if not usable:
        raise SetupError("validation: no question has gold SQL; give a set with it, or validation.every=0")
    chosen = sample_questions(usable, settings.sample, config.seed)
    digest = hashlib.sha256(settings.model_dump_json(exclude={"every", "at_start"}).encode())
    for example in chosen:
        digest.update(f"\0{example.question_id}\0{example.db_id}\0{example.gold_sql}".encode("utf-8", "replace"))
    held_out = HeldOut(settings.name, chosen, len(usable), digest.hexdigest()[:16])
    report(f"validation: {held_out.description}, read {loaded.summary()}")
    return held_out


def sample_questions(examples: Sequence[Example], n: int, seed: int) -> list[Example]:
    """`n` of the questions (0: all) in their order: those whose hash with the seed is smallest.

    Which ones depends on nothing but ids and seed, and a larger sample holds the smaller.
    """
    if not n or n >= len(examples):
        return list(examples)
    ranked = sorted(range(len(examples)), key=lambda i: derived_number("sample", seed, examples[i].question_id))
    return [examples[i] for i in sorted(ranked[:n])]


def _load(config: TrainConfig) -> Loaded:
    settings = config.validation
    if settings.benchmark == "toy":
        from shared.data.toy import toy_examples

        out = config.output / TOY_HELD_OUT
        return Loaded(toy_examples("heldout", settings.toy_databases, settings.toy_questions, config.seed, out))
    from shared.data.bird import read_questions

    assert settings.questions is not None
    assert settings.databases is not None
    return read_questions(settings.questions, settings.databases)


def validation_config(config: TrainConfig, mode: Mode) -> EpisodeConfig:
    """The run's budgets with the evaluation's sampling and fallback."""
    settings = config.validation
    sampling = SamplingParams(temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
    return replace(episode_config(config.rollout, mode), fallback=settings.fallback, sampling=sampling)


def ask(
    examples: Sequence[Example],
    config: TrainConfig,
    mode: Mode,
    engine: Engine,
    codec: ChatCodec,
    sandbox: Sandbox,
    on_episode: Callable[[EpisodeRecord], None] = lambda record: None,
) -> Iterator[tuple[Example, EpisodeRecord]]:
    """One episode for each question; its seed depends on (run seed, question id) and not on the step or the mode."""
    tasks = [Task(example, derived_number("validation", config.seed, example.question_id)) for example in examples]
    running = run_episodes(
        tasks,
        engine,
        codec,
        sandbox,
        validation_config(config, mode),
        concurrency=config.rollout.concurrency,
        tool_threads=config.rollout.sandbox_workers,
    )
    for index, record in running:
        on_episode(record)
        yield examples[index], record


def validation_sums(pairs: Iterable[tuple[Example, EpisodeRecord]], scorer: Scorer, workers: int) -> dict[str, float]:
    """Sums over one rank's episodes, ready to be added over ranks.

    An answer is right by BIRD's rule (`official_equal`), empty gold results included. Questions whose gold fails and
    episodes that ended by a fault of ours are counted and not scored.
    """

    def one(pair: tuple[Example, EpisodeRecord]) -> dict[str, float]:
        example, record = pair
        if record.ended == "error":
            return {"errors": 1}
        gold = scorer.rows(example.database, example.gold_sql)
        if gold is None:
            return {"gold_fails": 1}
        rows = scorer.rows(example.database, record.answer_sql)
        return {
            "questions": 1,
            "official": rows is not None and official_equal(rows, gold),
            "executes": rows is not None,
            "submitted": record.origin == "submitted",
            "fallback": record.origin == "fallback",
            "truncated": record.truncated,
            "turns": len(record.turns),
            "calls": sum(len(turn.calls) for turn in record.turns),
            "tokens": len(record.ids),
        }

    sums: dict[str, float] = defaultdict(float)
    with ThreadPoolExecutor(workers, thread_name_prefix="score") as threads:
        for part in threads.map(one, pairs):
            for name, value in part.items():
                sums[name] += value
    return dict(sums)


_MEANS = ("official", "executes", "submitted", "fallback", "truncated", "turns", "calls", "tokens")


def validation_line(
    step: int, held_out: HeldOut, sums: Mapping[Mode, Mapping[str, float]], weights: str, seconds: float
) -> dict[str, Any]:
    """One line of validation.jsonl: the figures of each mode after `step` finished steps, and the selection score.

    `sums` has the modes in the config's order; the official accuracy (in [0, 1]) in the first is the score.
    """
    line: dict[str, Any] = {"step": step}
    for mode, of_mode in sums.items():
        n = of_mode.get("questions", 0)
        line[mode] = {name: of_mode.get(name, 0.0) / max(n, 1) for name in _MEANS}
        line[mode] |= {name: int(of_mode.get(name, 0)) for name in ("questions", "errors", "gold_fails")}
    first = next(iter(sums))
    return line | {
        "score": line[first]["official"],
        "selected_on": f"official accuracy on {held_out.description}, schema {'shown' if first == 'full' else first}",
        "key": held_out.key,
        "weights": weights,
        "seconds": seconds,
    }


def spoken(line: Mapping[str, Any], modes: Sequence[Mode], name: str, best: bool) -> str:
    """The terminal's line for one validation."""
    parts = [
        f"{mode} {100 * line[mode]['official']:.1f}% (n {line[mode]['questions']}, "
        f"submitted {100 * line[mode]['submitted']:.0f}%, calls {line[mode]['calls']:.1f})"
        for mode in modes
    ]
    text = f"validation after step {line['step']} on {name}: " + ", ".join(parts)
    return text + (f"; best so far, selected by {modes[0]}" if best else "")
