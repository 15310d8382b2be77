"""The model card of an export: README.md, from its records and from nothing else.

The text stands in templates/model_card.md.j2. What evaluation runs add comes in as finished markdown, because this
side of the project knows nothing of the other.
"""

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FunctionLoader, StrictUndefined

from shared.episode import EpisodeConfig
from shared.errors import SetupError
from shared.text import escape_markdown, model_name
from shared.tools.protocol import EXEC_PLAN_TOOL_INSTRUCTIONS, PROMPT_SHA256
from train.config import RewardConfig, TrainConfig
from train.export.aux_files import GENERATION_CONFIG, STOP_TOKENS, read_json
from train.export.record import Base, CardRecord, Progress, Training
from train.log import format_seconds

CARD = "README.md"


def render_card(record: CardRecord, report: Mapping[str, Any], folder: Path, results: str = "") -> str:
    """The card of the export in `folder`. `report` is its export_report.json, `results` the markdown of evaluations.

    SetupError when the folder's generation config cannot be read.
    """
    training = record.training
    text: str = (
        _environment()
        .get_template("model_card.md.j2")
        .render(
            record=record,
            report=report,
            training=training,
            front_matter=_front_matter(record),
            base_link=_base_link(record.base),
            agent_flags=_agent_flags(training.config) if training else "",
            max_tokens=max_tokens(record),
            stops=_stops(folder),
            prompt=EXEC_PLAN_TOOL_INSTRUCTIONS,
            prompt_sha256=PROMPT_SHA256,
            training_rows=list(_training_rows(training)) if training else [],
            selection=list(_selection(training)) if training else [],
            results=results.strip(),
            limits=list(_limits(report, training)),
            licence=list(_licence(record.base)),
            number=_number,
            model_name=model_name,
        )
    )
    return text.strip() + "\n"


def max_tokens(record: CardRecord) -> int:
    """The context to serve the model with: an episode's budget in training, or the evaluation's where none is known."""
    return record.training.config.rollout.max_tokens if record.training else EpisodeConfig().max_tokens


def _environment() -> Environment:
    """The text is markdown, not HTML: values from outside go through the filters `code` and `escape`."""
    environment = Environment(
        loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters |= {"code": code, "escape": escape_markdown}
    return environment


def _read(name: str) -> str:
    return (resources.files("train.export") / "templates" / name).read_text(encoding="utf-8")


def code(text: str) -> str:
    """The text as a code span that fits into a table's cell.

    >>> code("a|b`c")
    '`a\\\\|b\\'c`'
    """
    return "`" + " ".join(str(text).replace("`", "'").replace("|", "\\|").split()) + "`"


def _number(value: float) -> str:
    return f"{value:,}"


def _front_matter(record: CardRecord) -> str:
    """The head that a hub reads. What is not known is left out."""
    base, tags = record.base, ["text-to-sql", "sqlite", "agent"]
    head: dict[str, Any] = {}
    if base.hub_id:
        head |= {"base_model": base.hub_id, "base_model_relation": "finetune"}
    for key in ("license", "license_name", "license_link"):
        if value := getattr(base, key):
            head[key] = value
    head |= {"library_name": "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = [*tags, "grpo"] if record.training else tags
    return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def _base_link(base: Base) -> str:
    if base.hub_id is None:
        return f"the folder {code(base.name)}"
    commit = f" (commit {base.revision[:12]})" if base.revision else ""
    return f"[{base.hub_id}](https://huggingface.co/{base.hub_id}){commit}"


def _stops(folder: Path) -> str:
    ids = read_json(folder / GENERATION_CONFIG).get("eos_token_id")
    if not isinstance(ids, list) or len(ids) != len(STOP_TOKENS):
        raise SetupError(f"{folder / GENERATION_CONFIG} has the stops {ids}, not two ids: export the checkpoint again")
    return " and ".join(f"`{token}` ({i})" for token, i in zip(STOP_TOKENS, ids, strict=True))


def _agent_flags(config: TrainConfig) -> str:
    """What agent.py must be told where the run's budgets are not the evaluation's."""
    usual, rollout = EpisodeConfig(), config.rollout
    flags = [
        f" --{name.replace('_', '-')} {getattr(rollout, name)}"
        for name in ("max_tokens", "max_turns", "max_new_tokens")
        if getattr(rollout, name) != getattr(usual, name)
    ]
    return "".join(flags)


# ---- training


def _training_rows(training: Training) -> Iterator[tuple[str, str]]:
    """The recipe, row by row: each value is a key of the run's config, or a figure of its record."""
    config, progress = training.config, training.progress
    rollout, loss, reward = config.rollout, config.loss, config.reward
    revision = f", revision {code(config.model.revision)}" if config.model.revision else ""
    yield "start", code(model_name(config.model.path)) + revision
    yield "data", _data(config)
    yield "question pool", f"sha256 {code(training.pool_hash)}"
    share = rollout.explore_share
    yield "schema", f"withheld in {100 * share:g}% of the episodes" + (", shown in the others" if share < 1 else "")
    yield "curriculum", _curriculum(config)
    yield "batch", _batch(config)
    yield (
        "episode budget",
        f"{rollout.max_tokens:,} tokens, {rollout.max_turns} tool turns, {rollout.max_new_tokens:,} new tokens a turn",
    )
    yield (
        "sampling in training",
        f"temperature {rollout.temperature:g}, top-p {rollout.top_p:g}, top-k {rollout.top_k}, engine {rollout.engine}",
    )
    yield (
        "reward",
        f"{reward.exact:g} for gold's result; else {reward.partial:g} x F1 over {reward.partial_over}, "
        f"+{reward.join_bonus:g} join agreement, +{reward.majority_bonus:g} majority"
        f"{', both only in groups with a right answer' if reward.gate_bonuses else ''}",
    )
    yield "groups left out", _left_out(reward)
    yield "loss", f"sum over sampled tokens / {loss.token_constant:g}; advantage = reward - group mean"
    ratio = "none"
    if loss.ratio == "sequence":
        ratio = f"sequence-level against the sampler's log-probs, clip {loss.clip_low:g} / {loss.clip_high:g}"
    yield "ratio", ratio
    yield "KL to the start", _kl(config)
    yield "optimizer", _optimizer(config)
    yield "inner epochs", str(loss.inner_epochs)
    yield "weights in training", f"{config.model.dtype}, autocast {config.model.autocast}"
    yield "steps", f"{training.step:,} of {config.schedule_steps:,} planned"
    if progress is not None:
        yield from _progress_rows(progress)
    yield "seed", str(config.seed)
    yield "fingerprint of the weights", code(training.weights)


def _progress_rows(progress: Progress) -> Iterator[tuple[str, str]]:
    if progress.ranks:
        yield "data-parallel ranks", " or ".join(map(str, progress.ranks))
    yield "time in these steps", format_seconds(progress.seconds)
    yield "episodes", f"{progress.episodes:,}, {progress.sampled_tokens:,} tokens sampled in them"
    if progress.skipped_steps:
        yield "steps without a group that differs", f"{progress.skipped_steps:,}"
    for name, (first, last) in (("mean reward", progress.reward), ("share with gold's result", progress.exact)):
        yield f"{name}, first and last {progress.window} steps", f"{first:.3f}, {last:.3f}"


def _data(config: TrainConfig) -> str:
    data = config.data
    levels = f"; {', '.join(data.difficulties)}" if data.difficulties else ""
    limit = f"; the first {data.limit:,}" if data.limit else ""
    limit += f"; without golds that an audit flagged {', '.join(data.audit_drop)}" if data.audit else ""
    if data.benchmark == "toy":
        return f"generated: {data.toy_questions:,} questions over {data.toy_databases:,} databases{levels}{limit}"
    names = [model_name(str(name)) for name in (data.queries, data.schemas, data.questions, data.databases) if name]
    split = f", split {data.split}, phrasing {data.phrasing}" if data.benchmark == "sqale" else ""
    return f"{', '.join(map(code, names))}{split}{levels}{limit}"


def _curriculum(config: TrainConfig) -> str:
    curriculum = config.curriculum
    mix = ", ".join(f"{name} x {factor:g}" for name, factor in curriculum.mix.items())
    by_difficulty = f"; weight by difficulty: {mix}" if mix else ""
    if not curriculum.enabled:
        return f"none: questions drawn {'without regard to length' if mix else 'uniformly'}{by_difficulty}"
    ramp = f"over {curriculum.ramp_steps:,} steps (k = {curriculum.k:g})"
    return f"by length of the gold query, short first, {ramp}{by_difficulty}"


def _batch(config: TrainConfig) -> str:
    questions, candidates = config.rollout.questions, config.rollout.candidates
    return f"{questions} questions x {candidates} candidates = {questions * candidates} episodes a step"


def _left_out(reward: RewardConfig) -> str:
    """Which groups of candidates carry no signal, and what takes their place."""
    if reward.group_filter == "off":
        return "none"
    which = "all rewards equal" if reward.group_filter == "reward" else "all right or none right"
    return which + (f"; replaced by further questions, up to {reward.refill} times a step" if reward.refill else "")


def _kl(config: TrainConfig) -> str:
    kl = config.loss.kl
    if kl.mode == "off":
        return "none"
    if kl.mode == "fixed":
        return f"k3, coefficient {kl.coefficient:g}"
    return f"k3, target {kl.target:g} (adaptive coefficient, from {kl.coefficient:g})"


def _optimizer(config: TrainConfig) -> str:
    optimizer = config.optimizer
    rates = f"lr {optimizer.lr:g}"
    if optimizer.name == "muon":
        rates = f"matrices {optimizer.muon_lr:g}, the rest by AdamW at {optimizer.lr:g}"
    schedule = f"{optimizer.schedule}, {100 * optimizer.warmup_share:g}% warm-up, gradient norm at most "
    return f"{optimizer.name}, {rates}, {schedule}{optimizer.clip_norm:g}"


def _selection(training: Training) -> Iterator[str]:
    """Which state of the run this is, whether a score chose it, and what that does to the score."""
    planned = training.config.schedule_steps
    last = training.step >= training.newest_step
    yield (
        f"This is the state after step {training.step:,}, "
        + (
            "the last one that the run reached."
            if last
            else f"not the run's last: it reached step {training.newest_step:,}."
        )
    )
    if not training.finished:
        yield f"The run did not finish: {planned:,} steps were planned, it reached step {training.newest_step:,}."
    found = training.selection
    if found is None or found.best_step is None or found.best_score is None:
        yield "The run was not validated while it trained: no score chose this checkpoint."
        return
    where = f"{escape_markdown(found.selected_on)}, asked {found.rounds} times"
    if found.best_step == training.step:
        yield (
            f"It is the run's `best`: it scored highest ({found.best_score:.3f}) on what the run was validated on "
            f"({where}). The highest of several scores on one set is too high an estimate, so that one is no result, "
            "and what it scores on other questions of that set is not neutral either."
        )
        return
    own = "it was not asked at this step" if found.score is None else f"this one scored {found.score:.3f} there"
    yield (
        f"It is not the run's `best`: step {found.best_step:,} scored highest ({found.best_score:.3f}) on what the run "
        f"was validated on ({where}); {own}. That highest score is too high an estimate for that checkpoint."
    )


def _limits(report: Mapping[str, Any], training: Training | None) -> Iterator[str]:
    carried = [origin.removeprefix("base ") for origin in report["origins"] if origin.startswith("base ")]
    if carried:
        parts = {"language": "other language-model tensors", "vision": "vision tower", "MTP": "MTP head"}
        names = " and ".join(parts.get(name, name) for name in carried)
        yield f"The base's {names} {'is' if len(carried) == 1 else 'are'} carried over untouched, never trained here."
    if training is not None:
        yield "A prompt that holds the schema and wants SQL in one turn is not what it was trained for."
        if training.config.rollout.explore_share >= 1:
            yield "In training the schema was never shown: the model had to look it up."


def _licence(base: Base) -> Iterator[str]:
    if base.license:
        name = base.license_name or base.license
        link = f" ({escape_markdown(base.license_link)})" if base.license_link else ""
        yield f"The base's card says: {escape_markdown(name)}{link}."
    if base.license_files:
        verb = "is" if len(base.license_files) == 1 else "are"
        yield f"The base's {' and '.join(base.license_files)} {verb} in this folder."
    if not base.license and not base.license_files:
        yield "The base's folder states no licence."
