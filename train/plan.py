"""`python -m train.run --config … --dry-run`: what a run would do, from its config, its data and the model's config.

Nothing is written and no weights are read. Problems that the run would stop at are collected and shown together.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from shared.config import dump_config
from shared.engines.hf_load import missing_kernels
from shared.engines.tokenizer import first_line
from shared.errors import SetupError
from train.config import TrainConfig
from train.curriculum import expected_quantile
from train.curriculum_report import difficulty_line
from train.log import METRICS, format_seconds
from train.memory import Shape, format_bytes, memory_plan, model_shape, peaks
from train.model import check_model_path
from train.pool import Pool, check_draws, load_pool
from train.rollout import curriculum_settings
from train.run import check_ranks
from train.validation import HeldOut, load_held_out

T = TypeVar("T")


@dataclass(frozen=True)
class Assumptions:
    """What a time plan needs and no config says; replaced by the run's own figures once it has some.

    ranks: data-parallel processes. mean_tokens: of an episode, prompt and results included (0: a quarter of the
    budget), half of them sampled. tflops: matrix rate that a rank reaches in the update, 10^12 operations a second.
    decode_rate: sampled tokens a second and rank.
    """

    ranks: int = 1
    mean_tokens: int = 0
    tflops: float = 150.0
    decode_rate: float = 1500.0


def dry_run(config: TrainConfig, assumptions: Assumptions, console: Console | None = None) -> int:
    """Print config, pool, memory and time plan; returns 0. SetupError with the first of the problems found, if any."""
    console = console or Console(width=None if sys.stdout.isatty() else 140, soft_wrap=True, highlight=False)
    problems: list[SetupError] = []

    def say(text: str = "") -> None:
        console.print(text, markup=False)

    say(dump_config(config))
    with tempfile.TemporaryDirectory() as scratch:
        # Generated databases belong to a run that takes place.
        away = config.model_copy(update={"output": Path(scratch)})
        pool = _attempt(lambda: load_pool(away.data, away.output, away.seed, say), problems)
        if pool is not None:
            _print_pool(pool, config, console, problems)
            held_out = _attempt(lambda: load_held_out(away, pool.examples, say), problems)
        else:
            held_out = _attempt(lambda: load_held_out(away, (), say), problems)
    _attempt(lambda: check_ranks(config, assumptions.ranks), problems)
    _attempt(lambda: check_model_path(config.model.path), problems)
    model = _attempt(lambda: model_config(config), problems)
    if model is not None:
        shape = model_shape(model)
        _print_memory(shape, config, assumptions.ranks, console)
        _print_time(shape, config, assumptions, held_out, say)
        if slow := missing_kernels(model, "cpu" if config.device == "cpu" else "cuda"):
            say(slow)
    if problems:
        for problem in problems[1:]:
            say(f"also: {problem}")
        raise problems[0]
    say("dry run: nothing was loaded, nothing was written")
    return 0


def model_config(config: TrainConfig) -> Any:
    """The transformers config of the run's model: its folder's, or the hub's one file. SetupError if neither."""
    path = Path(config.model.path)
    try:
        if not path.is_dir():
            path = Path(hf_hub_download(config.model.path, "config.json", revision=config.model.revision)).parent
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise SetupError(f"model.path: no config.json of {config.model.path} ({first_line(error)})") from error


def _attempt(action: Callable[[], T], problems: list[SetupError]) -> T | None:
    try:
        return action()
    except SetupError as error:
        problems.append(error)
        return None


def _print_pool(pool: Pool, config: TrainConfig, console: Console, problems: list[SetupError]) -> None:
    """Sizes by difficulty, gold lengths, and what the curriculum makes of them."""
    table = Table(title=f"pool: {len(pool.examples):,} questions", title_justify="left")
    for name in ("difficulty", "questions", "databases", "gold tokens: shortest", "median", "longest"):
        table.add_column(name, justify="left" if name == "difficulty" else "right")
    counts = Counter(example.difficulty for example in pool.examples)
    for difficulty, count in counts.most_common():
        of = [i for i, example in enumerate(pool.examples) if example.difficulty == difficulty]
        lengths = [pool.lengths[i] for i in of]
        databases = len({pool.examples[i].db_id for i in of})
        figures = (count, databases, min(lengths), round(median(lengths)), max(lengths))
        table.add_row(difficulty or "(none given)", *(f"{figure:,}" for figure in figures))
    console.print(table)
    settings = curriculum_settings(config)
    marks = sorted({0, min(settings.ramp_steps, config.steps - 1) // 2, min(settings.ramp_steps, config.steps - 1)})
    n = config.rollout.questions
    factors = _attempt(lambda: check_draws(pool, config.curriculum.mix, n), problems)
    if factors is not None:
        console.print(difficulty_line(pool, marks, settings, factors), markup=False)
    means = [(step, expected_quantile(pool.quantiles, step, settings, factors)) for step in marks]
    drawn = ", ".join(f"{mean:.3f} at step {step}" for step, mean in means)
    console.print(f"mean quantile drawn: {drawn}", markup=False)
    share = config.steps * n / len(pool.examples)
    console.print(f"{config.steps:,} steps draw each question {share:.2f} times on average", markup=False)


def _print_memory(shape: Shape, config: TrainConfig, ranks: int, console: Console) -> None:
    items = memory_plan(config, shape, ranks)
    table = Table(title=f"memory of each of {ranks} rank(s)", title_justify="left")
    for name in ("part", "update", "rollout", "how"):
        table.add_column(name, justify="right" if name in ("update", "rollout") else "left")
    for item in items:
        size = format_bytes(item.size)
        table.add_row(item.name, size if item.update else "", size if item.rollout else "", item.note)
    update, rollout = peaks(items)
    table.add_row("together", format_bytes(update), format_bytes(rollout), "besides fragmentation and the libraries")
    console.print(table)


def _print_time(
    shape: Shape, config: TrainConfig, assumptions: Assumptions, held_out: HeldOut | None, say: Callable[..., None]
) -> None:
    episodes = config.rollout.questions * config.rollout.candidates
    measured = measured_seconds(config.output)
    if measured is not None:
        step, n, done = measured
        say(f"time: {step:.1f} s a step, the mean of the last {n} in {config.output / METRICS}")
    else:
        done = 0
        mean = assumptions.mean_tokens or config.rollout.max_tokens // 4
        assumptions = replace(assumptions, mean_tokens=mean)
        rollout, update = step_seconds(config, shape, assumptions)
        step = rollout + update
        say(
            f"time (assumed: {mean:,} tokens an episode, half of them sampled; a rank decodes "
            f"{assumptions.decode_rate:,.0f} tokens/s and computes {assumptions.tflops:,.0f} TFLOP/s): rollouts "
            f"{rollout:.0f} s, update {update:.0f} s a step of {episodes} episodes, at most "
            f"{episodes * config.rollout.max_tokens:,} tokens"
        )
    left = max(config.steps - done, 0)
    total = left * step
    text = f"{left:,} steps: {format_seconds(total)}"
    if held_out is not None:
        rounds = left // config.validation.every + bool(config.validation.at_start and not done)
        asked = rounds * len(held_out.examples) * len(config.validation.modes)
        text += f", and {rounds} validations of {asked // max(rounds, 1):,} episodes, as long as {asked / episodes:.0f}"
        text += " steps' rollouts"
    say(text)


def step_seconds(config: TrainConfig, shape: Shape, assumptions: Assumptions) -> tuple[float, float]:
    """(rollouts, update) of one step under the assumptions.

    The update takes 6 operations a parameter and token, 2 more with checkpointing and 2 for the reference; attention
    over the context is left out (a 2B hybrid: 4% at 6,000 tokens, 16% at 24,576). The embedding is no product, the
    output projection is.
    """
    episodes = config.rollout.questions * config.rollout.candidates / assumptions.ranks
    operations = 6 + 2 * config.model.gradient_checkpointing + 2 * (config.loss.kl.mode != "off")
    matrices = shape.matrices + shape.vocabulary * shape.hidden
    tokens = episodes * assumptions.mean_tokens
    update = config.loss.inner_epochs * operations * matrices * tokens / (assumptions.tflops * 1e12)
    return tokens / 2 / assumptions.decode_rate, update


def measured_seconds(output: Path, window: int = 20) -> tuple[float, int, int] | None:
    """(mean seconds, of how many steps, steps finished) of the newest steps of a run; None where there are none."""
    try:
        lines = [json.loads(line) for line in (output / METRICS).read_text(encoding="utf-8").splitlines()]
        seconds = [float(line["seconds"]) for line in lines[-window:]]
        done = int(lines[-1]["step"]) + 1 if lines else 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (sum(seconds) / len(seconds), len(seconds), done) if seconds else None
