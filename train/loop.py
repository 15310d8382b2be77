"""The run: set everything up, then draw, roll out, score, update and save, step by step, until done or told to stop."""

import copy
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list, gather_object
from transformers.utils.logging import disable_progress_bar

from shared.config import dump_config
from shared.engines.hf_load import hide_kernels, missing_kernels
from shared.episode import EpisodeRecord, Mode
from shared.errors import SetupError
from shared.sql.sandbox import Sandbox
from train.checkpoint import list_checkpoints, newest_complete
from train.config import TrainConfig
from train.curriculum import expected_quantile
from train.log import RunLog, Stopwatch, write_lines
from train.model import Policy, load_model, load_policy
from train.pool import Pool
from train.rollout import (
    Group,
    Question,
    Scorer,
    StepDraw,
    add_sums,
    check_weights,
    curriculum_settings,
    episode_lines,
    rollout_sums,
    run_groups,
    score_groups,
    summarize,
    training_rows,
    with_signal,
)
from train.rollout_engines import EngineFactory, RolloutEngine, check_rollout_engine, make_rollout_engine
from train.run import CONFIG_COPY, check_ranks
from train.selection import beats_all, publish_best, read_validation
from train.state import gather_run, read_state, restore, save_run
from train.stopping import StopFlag, StoppableEngine, StopRequested, only_one
from train.trackers import open_trackers
from train.trainer import Trainer
from train.validation import HeldOut, ask, spoken, validation_line, validation_sums


@dataclass
class Run:
    """Everything that lives while a run does; one on each rank."""

    config: TrainConfig
    pool: Pool
    policy: Policy
    trainer: Trainer
    engine: RolloutEngine
    sandbox: Sandbox
    scorer: Scorer
    log: RunLog
    stop: StopFlag
    held_out: HeldOut | None

    @property
    def rank(self) -> int:
        return int(self.trainer.accelerator.process_index)

    @property
    def ranks(self) -> int:
        return int(self.trainer.accelerator.num_processes)

    def save(self, step: int) -> None:
        """Checkpoint after `step` finished steps; all ranks wait for the one that writes, and all fail if it did."""
        problem: list[str | None] = [None]
        gathered = gather_run(self.trainer, keep=self.rank == 0)
        if self.rank == 0:
            try:
                save_run(self.config, step, self.trainer, self.policy, self.pool.content_hash, gathered)
            except SetupError as error:
                problem = [str(error)]
        broadcast_object_list(problem)
        if problem[0] is not None:
            raise SetupError(problem[0])

    def stopping(self) -> bool:
        """Whether any rank was asked to stop; all ranks call it and get the same answer."""
        return any(gather_object([self.stop.requested()]))


def run_training(
    config: TrainConfig,
    pool: Pool,
    stop: StopFlag,
    make_engine: EngineFactory = make_rollout_engine,
    held_out: HeldOut | None = None,
) -> int:
    """Train from the start, or from the newest complete checkpoint in the run's folder; returns the exit code.

    `held_out` is what the run is validated on; None for no validation.
    """
    disable_progress_bar()
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    # The only buffers are constants (rotary frequencies): broadcasting them would be a collective in each forward.
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    accelerator = Accelerator(cpu=config.device == "cpu", kwargs_handlers=handlers)
    if config.device == "cuda" and accelerator.device.type != "cuda":
        raise SetupError("device: cuda is not available; use device=auto or device=cpu")
    check_ranks(config, accelerator.num_processes)
    check_rollout_engine(config)
    with only_one(config.output) if accelerator.is_main_process else nullcontext():
        return _run(config, pool, stop, make_engine, accelerator, held_out)


def _run(
    config: TrainConfig,
    pool: Pool,
    stop: StopFlag,
    make_engine: EngineFactory,
    accelerator: Accelerator,
    held_out: HeldOut | None,
) -> int:
    """Load what there is, write down the config, and go."""
    log = RunLog(config.output, config.steps, main=accelerator.is_main_process)
    found = newest_complete(config.output, log.say)
    if found is None and list_checkpoints(config.output):
        log.say("no checkpoint is complete: starting from the beginning")
    resumed = read_state(*found, config, pool.content_hash) if found else None
    start = resumed.step if resumed else 0
    if start >= config.steps and not _validation_due(config, held_out, start):
        log.say(f"{config.output} has finished its {config.steps} steps; raise steps= to go on")
        return 0
    hide_kernels(accelerator.device.type)
    policy = load_policy(config.model, str(resumed.folder) if resumed else None)
    if slow := missing_kernels(policy.model.config, accelerator.device.type):
        log.say(slow)
    reference = None
    if config.loss.kl.mode != "off" and config.model.lora is None:
        reference = load_model(config.model) if resumed else copy.deepcopy(policy.model)
    trainer = Trainer(config, policy.model, reference, accelerator)
    if resumed:
        restore(trainer, resumed)
    if accelerator.is_main_process:
        (config.output / CONFIG_COPY).write_text(dump_config(config), encoding="utf-8")
        stop.clear()
    accelerator.wait_for_everyone()
    log.drop_from(start)
    if accelerator.is_main_process and held_out is not None:
        publish_best(config.output, log.say)  # a kill may have come before it
    parameters = sum(p.numel() for p in policy.model.parameters())
    log.say(
        f"{f'continuing at step {start + 1}' if resumed else 'starting'}: {parameters:,} parameters, "
        f"{len(pool.examples):,} questions, {config.rollout.questions} x {config.rollout.candidates} episodes a step, "
        f"{accelerator.num_processes} rank(s) on {accelerator.device.type}, {platform.node()}"
    )
    if accelerator.is_main_process:
        settings = config.model_dump(mode="json")
        log.trackers = open_trackers(config.log.trackers, config.output, config.log.project, settings, start, log.say)
    engine = make_engine(policy, trainer)
    with Sandbox(config.rollout.sandbox_workers) as sandbox:
        scorer = Scorer(config, sandbox)
        run = Run(config, pool, policy, trainer, engine, sandbox, scorer, log, stop, held_out)
        try:
            _check_degenerate(run)
            return _steps(run, start)
        finally:
            log.close()
            engine.close()


def _check_degenerate(run: Run) -> None:
    """Print what policies that look at nothing would earn on a sample of the pool; stop when it is too much."""
    limit = run.config.reward.degenerate_limit
    n = len(run.pool.examples)
    sample = min(run.config.reward.degenerate_sample, n)
    if run.rank != 0 or sample == 0:
        return
    rewards = run.scorer.degenerate_rewards([run.pool.examples[i * n // sample] for i in range(sample)])
    run.log.say("mean reward of blind answers: " + ", ".join(f"{sql} {value:.3f}" for sql, value in rewards.items()))
    worst = max(rewards, key=rewards.__getitem__)
    if rewards[worst] > limit:
        raise SetupError(
            f"always submitting `{worst}` earns {rewards[worst]:.3f} on the pool, the limit reward.degenerate_limit is "
            f"{limit}: the pool would teach it; drop such questions"
        )


def _steps(run: Run, start: int) -> int:
    """Steps `start` to the end, with checkpoints and validation; returns the exit code."""
    # Also where a run was stopped between a checkpoint and its validation.
    if not _validate(run, start):
        return _leave(run, start)
    for step in range(start, run.config.steps):
        try:
            finished = _one_step(run, step)
        except StopRequested:
            finished = False
        if not finished:
            return _leave(run, step)
        done = step + 1
        if done % run.config.checkpoint.every == 0 or done == run.config.steps:
            run.log.phase(f"step {done}: saving")
            run.save(done)
        if not _validate(run, done):
            return _leave(run, done)
    run.log.say(f"finished {run.config.steps} steps: {run.config.output}")
    return 0


def _leave(run: Run, done: int) -> int:
    """Save what `done` finished steps have made, and return the exit code."""
    run.engine.reset()
    run.log.say(f"asked to stop: saving the state after {done} steps")
    run.save(done)
    if run.rank == 0:
        run.stop.clear()
    return run.stop.exit_code


def _validation_due(config: TrainConfig, held_out: HeldOut | None, done: int) -> bool:
    """Whether the state after `done` finished steps is one to be validated, and has not been."""
    every = config.validation.every
    if held_out is None or not (config.validation.at_start if done == 0 else done % every == 0 or done == config.steps):
        return False
    return all(line["step"] != done or line.get("key") != held_out.key for line in read_validation(config.output))


def _validate(run: Run, done: int) -> bool:
    """Judge the weights on the held-out questions if it is time, and keep them if they are the best so far.

    False when a stop was asked for meanwhile: the figures are given up, and measured after the resume.
    """
    config, held_out = run.config, run.held_out
    due = [_validation_due(config, held_out, done)]
    broadcast_object_list(due)
    if held_out is None or not due[0]:
        return True
    watch = Stopwatch()
    mine = held_out.examples[run.rank :: run.ranks]
    engine = StoppableEngine(run.engine, run.stop)
    run.engine.refresh()
    sums: dict[Mode, dict[str, float]] = {}
    try:
        for mode in config.validation.modes:
            run.log.phase(f"validation after step {done}: {len(held_out.examples)} questions, {mode}")
            with run.trainer.autocast():
                pairs = ask(mine, config, mode, engine, run.policy.codec, run.sandbox)
                sums[mode] = validation_sums(pairs, run.scorer, config.rollout.sandbox_workers)
    except StopRequested:
        run.stop.announce()
    run.engine.reset()
    if run.stopping():
        return False
    watch.lap("validation")
    totals = {mode: add_sums(gather_object([sums[mode]])) for mode in config.validation.modes}
    line = validation_line(done, held_out, totals, run.trainer.weights, watch.seconds["validation"])
    best = [beats_all(config.output, line)]
    broadcast_object_list(best)
    run.log.validation(line | {"best": best[0]}, spoken(line, config.validation.modes, held_out.name, best[0]))
    if best[0]:
        run.save(done)
        if run.rank == 0:
            publish_best(config.output, run.log.say)
    return True


def _one_step(run: Run, step: int) -> bool:
    """One step on this rank; False when a stop was asked for before the update, and then nothing has changed."""
    config, label = run.config, f"step {step + 1}/{run.config.steps}"
    watch = Stopwatch()
    asked = _ask(run, step, label, watch)
    if asked is None:
        return False
    sums = add_sums(gather_object([rollout_sums(asked.groups, config)]))
    if sums.get("episodes", 0) == 0:
        first = next((error for group in asked.groups for error in group.errors), "on another rank")
        raise RuntimeError(f"step {step}: every episode failed by a fault of ours; the first: {first}")
    n_episodes = sum(gather_object([sum(len(group.episodes) for group in asked.trained)]))
    run.log.phase(f"{label}: updating")
    figures = run.trainer.update(
        training_rows(asked.trained, config), n_episodes, step, run.stop.poll if run.ranks == 1 else _stay
    )
    watch.lap("update")

    seconds = sum(watch.seconds.values())
    pool, factors = run.pool, run.pool.factors(config.curriculum.mix)
    run.log.step(
        {"step": step, "ranks": run.ranks}
        | summarize(sums)
        | {"quantile_expected": expected_quantile(pool.quantiles, step, curriculum_settings(config), factors)}
        | figures
        | {f"seconds_{name}": value for name, value in watch.seconds.items()}
        | {"seconds": seconds, "tokens_per_second": sums["sampled_tokens"] / max(seconds, 1e-9)}
        | {"questions": [question.example.question_id for question in asked.questions]}
        | {"skipped": asked.skipped, "weights": run.trainer.weights}
    )
    every = config.sample_episodes_every
    if every and step % every == 0 and run.rank == 0:
        write_lines(config.output / "episodes" / f"step-{step:06d}.jsonl", episode_lines(asked.groups, step))
    return True


@dataclass(frozen=True)
class Asked:
    """What a step asked: the `questions` of all ranks in drawn order, and this rank's `groups`.

    `trained` are the groups that the step's loss is about: all of them, but for those that were replaced by others.
    """

    questions: list[Question]
    skipped: dict[str, int]
    groups: list[Group]
    trained: list[Group]


def _ask(run: Run, step: int, label: str, watch: Stopwatch) -> Asked | None:
    """Draw, roll out and score, again in the place of groups without signal as often as configured; None to stop.

    One rank draws for all: a gold query near its time limit must not split the ranks over what the step is.
    """
    config = run.config
    draw = StepDraw(run.pool, step, config, run.scorer) if run.rank == 0 else None
    questions: list[Question] = []
    groups: list[Group] = []
    kept: list[Group] = []
    last: list[Group] = []
    missing = config.rollout.questions
    for attempt in range(1 + config.reward.refill):
        news: list[list[Question]] = [[]]
        if draw is not None:
            news = [draw.take(missing) if attempt else draw.first(missing)]
        broadcast_object_list(news)
        if not news[0]:
            break
        watch.lap("draw")
        n = len(news[0])
        mine = news[0][n * run.rank // run.ranks : n * (run.rank + 1) // run.ranks]
        kept += with_signal(last, config)
        last = []
        try:
            last = _collect(run, mine, step, label, watch)
        except StopRequested:
            run.stop.announce()
        if run.stopping():
            return None
        questions += news[0]
        groups += last
        missing -= sum(gather_object([len(with_signal(last, config))]))
        if missing <= 0:
            break
    skipped = [dict(draw.skipped) if draw is not None else {}]
    broadcast_object_list(skipped)
    return Asked(questions, skipped[0], groups, kept + last)


def _collect(run: Run, questions: Sequence[Question], step: int, label: str, watch: Stopwatch) -> list[Group]:
    """Roll out and score this rank's questions."""
    total, count = len(questions) * run.config.rollout.candidates, 0

    def on_episode(record: EpisodeRecord) -> None:
        nonlocal count
        count += 1
        run.log.phase(f"{label}: {count}/{total} episodes")

    run.log.phase(f"{label}: bringing the engine to the weights")
    run.engine.refresh()
    watch.lap("sync")
    run.log.phase(f"{label}: rolling out")
    engine = StoppableEngine(run.engine, run.stop)
    with run.trainer.autocast():
        episodes = run_groups(questions, step, run.config, engine, run.policy.codec, run.sandbox, on_episode)
    run.engine.reset()
    watch.lap("rollout")
    run.log.phase(f"{label}: scoring")
    groups = score_groups(questions, episodes, run.scorer, run.config.rollout.sandbox_workers)
    check_weights(groups, run.trainer.weights)
    watch.lap("score")
    return groups


def _stay() -> None:
    """Between the micro-batches of several ranks nobody may leave alone."""
