"""The typed config of a GRPO run: every number of the recipe is a key here, and nothing else is read.

`load_train_config` checks a file before anything heavy is imported or loaded. The defaults are the curriculum
run's numbers, so a shipped config shows what a run adds to or changes in the recipe.
"""

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from shared.config import StrictModel, load_config
from shared.errors import SetupError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
# Factors of a weight that is a float32.
MixFactor = Annotated[float, Field(ge=0, le=1e6)]
SMALLEST_FACTOR = 1e-6


class LoraConfig(StrictModel):
    """Adapters of rank `rank`, scaled by alpha / rank, beside the linear layers named in `targets`; see train/lora.py.

    targets: last parts of layer names, such as [q_proj, v_proj], or "all-linear" for all inside the decoder.
    """

    rank: PositiveInt = 16
    alpha: PositiveInt = 32
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = "all-linear"


class ModelConfig(StrictModel):
    """The start: weights to train from, which are also the frozen KL reference.

    path: a model folder or a hub id. dtype: of the master weights that the optimizer updates; a learning rate of
    1e-5 is lost in bfloat16's rounding, so float32 is the default and the forward pass is autocast instead. With
    bfloat16, what the folder stores in float32 stays so. lora: train adapters (float32) and leave the start as it is.
    """

    path: str
    revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    autocast: Literal["none", "bfloat16"] = "none"
    gradient_checkpointing: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    lora: LoraConfig | None = None


# What the audit of golds (python -m eval.audit) can say of one; docs/evaluation.md explains each.
GoldFlag = Literal[
    "gold_missing",
    "gold_error",
    "gold_timeout",
    "gold_limit",
    "gold_clock",
    "gold_tie",
    "gold_float",
    "gold_mismatch",
    "gold_empty",
    "slow",
    "ties_unchecked",
]


class DataConfig(StrictModel):
    """Where the pool of training questions comes from.

    benchmark "sqale": `queries` and `schemas` (hub ids or local folders) joined by the sqale package, asked in one
    `phrasing` of its styles ("any": the first usable). "questions": `questions` (a JSON file with Spider's or BIRD's
    keys) over `databases`/<db_id>/<db_id>.sqlite. "toy": the seeded generator, `toy_databases` databases with
    `toy_questions` questions, written to the run's folder.
    difficulties: keep only these (empty: all). limit: first n of the pool (0: all). empty_gold: whether a
    question with an empty gold result may be drawn: any query that returns nothing would be right.
    audit: the audit.json that `python -m eval.audit` wrote of these questions. Those that it flags with one of
    `audit_drop` leave the pool; by default golds that fail, and golds whose result hangs on ties or on the clock.
    """

    benchmark: Literal["sqale", "questions", "toy"]
    queries: str | None = None
    schemas: str | None = None
    split: str = "train"
    phrasing: str = "verbose"
    questions: Path | None = None
    databases: Path | None = None
    toy_databases: PositiveInt = 40
    toy_questions: PositiveInt = 2000
    difficulties: tuple[str, ...] = ()
    limit: NonNegativeInt = 0
    empty_gold: Literal["drop", "keep"] = "drop"
    audit: Path | None = None
    audit_drop: tuple[GoldFlag, ...] = (
        "gold_missing",
        "gold_error",
        "gold_timeout",
        "gold_limit",
        "gold_clock",
        "gold_tie",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        sources = {"questions": ("questions", "databases"), "sqale": ("queries", "schemas"), "toy": ()}
        for key in (*sources["questions"], *sources["sqale"]):
            if (getattr(self, key) is not None) != (read := key in sources[self.benchmark]):
                raise ValueError(f"benchmark '{self.benchmark}' {'needs' if read else 'does not read'} data.{key}")
        return self


class VllmConfig(StrictModel):
    """vLLM as the rollout engine, one in each rank, in the trainer's process: see train/rollout_engines.py.

    dtype: what the engine computes in. gpu_memory: share of the GPU for its weights and its cache. sleep: whether it
    gives both back while the trainer updates (not on a CPU). options: further arguments of vllm.LLM, which win.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    gpu_memory: Annotated[float, Field(gt=0, lt=1)] = 0.35
    enforce_eager: bool = False
    sleep: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)


class RolloutConfig(StrictModel):
    """One step's episodes: `questions` x `candidates` over all ranks.

    engine: hf decodes on the trainer's own model object; vllm has a copy of the weights, replaced after each update;
    server asks vLLM servers, see train/servers.py. servers: their addresses (http://host:port); when empty, those in
    EXECPLAN_ROLLOUT_SERVERS. sync_folder: where they find new weights, a folder that all their nodes see (/dev/shm
    will do on one node); the run's own by default.
    explore_share: share of the questions whose schema is withheld. fallback: whether an episode without an answer of
    its own is scored on its last good query; off, as the recipe pays nothing for nothing submitted.
    """

    questions: PositiveInt = 18
    candidates: Annotated[int, Field(ge=2)] = 8
    engine: Literal["hf", "vllm", "server"] = "hf"
    vllm: VllmConfig = VllmConfig()
    servers: tuple[str, ...] = ()
    sync_folder: Path | None = None
    explore_share: Share = 1.0
    max_turns: PositiveInt = 6
    max_new_tokens: PositiveInt = 2048
    max_tokens: PositiveInt = 24576
    max_failed_queries: PositiveInt = 4
    max_calls_per_turn: PositiveInt = 32
    strict_format: bool = False
    fallback: bool = False
    temperature: NonNegativeFloat = 1.0
    top_p: Share = 1.0
    top_k: NonNegativeInt = 0
    concurrency: PositiveInt = 256
    sandbox_workers: PositiveInt = 2
    query_seconds: PositiveFloat = 30.0


class CurriculumConfig(StrictModel):
    """See train/curriculum.py. `enabled: false` draws uniformly.

    mix: by difficulty (case ignored), what the weight of such a question is multiplied by, e.g.
    {simple: 1, moderate: 1, hard: 0.5}; 1 where nothing is said, 0 for never drawn. Empty: as the pool has them.
    """

    enabled: bool = True
    ramp_steps: PositiveInt = 400
    k: float = 2.0
    mix: dict[str, MixFactor] = {}  # noqa: RUF012 (pydantic copies it)

    @model_validator(mode="after")
    def _one_factor_a_difficulty(self) -> Self:
        for factor in self.mix.values():
            if factor and factor < SMALLEST_FACTOR:
                raise ValueError(f"curriculum.mix: {factor:g} is too small; give 0 or at least {SMALLEST_FACTOR:g}")
        if len({name.lower() for name in self.mix}) < len(self.mix):
            raise ValueError("curriculum.mix names a difficulty twice (case is ignored)")
        return self


class RewardConfig(StrictModel):
    """See train/reward.py. The defaults are the card's recipe.

    gate_bonuses: pay the two bonuses only in groups in which some candidate is right. group_filter: which groups
    carry no signal and are left out: "reward" those whose rewards are all equal, "exact" those in which
    all candidates or none are right, "off" none. refill: how often a step draws further questions in the place of
    groups left out (0: they are skipped). Groups that were replaced do not count in the loss's number of episodes;
    they count in all reported figures, and in groups_dropped.
    """

    exact: NonNegativeFloat = 3.0
    partial: NonNegativeFloat = 0.9
    partial_over: Literal["rows", "cells"] = "rows"
    join_bonus: NonNegativeFloat = 0.1
    majority_bonus: NonNegativeFloat = 0.1
    gate_bonuses: bool = False
    group_filter: Literal["reward", "exact", "off"] = "reward"
    refill: NonNegativeInt = 0
    degenerate_limit: NonNegativeFloat = 1.0
    degenerate_sample: NonNegativeInt = 64

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.partial + self.join_bonus + self.majority_bonus >= self.exact:
            raise ValueError(
                "partial + join_bonus + majority_bonus must stay below exact: no wrong query above a right one"
            )
        return self


class KlConfig(StrictModel):
    """KL to the frozen start, k3 a sampled token. adaptive: the coefficient follows `target`; fixed: it stays.

    offload: keep the frozen start in the host's memory, and on the device only while its log-probs are taken, which
    is before the step's first backward pass: a copy of the weights less at the peak, for two transfers a step.
    """

    mode: Literal["adaptive", "fixed", "off"] = "adaptive"
    target: PositiveFloat = 0.005
    coefficient: NonNegativeFloat = 0.02
    gain: Annotated[float, Field(ge=0, le=1)] = 0.1
    smallest: PositiveFloat = 1e-4
    largest: PositiveFloat = 1.0
    offload: bool = False


class LossConfig(StrictModel):
    """See train/loss.py. logprob_chunk: positions whose logits exist at a time."""

    token_constant: PositiveFloat = 1024.0
    ratio: Literal["sequence", "none"] = "sequence"
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.28
    kl: KlConfig = KlConfig()
    inner_epochs: PositiveInt = 1
    micro_batch_tokens: PositiveInt = 32768
    logprob_chunk: PositiveInt = 512


class GateConfig(StrictModel):
    """Trainer against sampler on the same tokens, before any update: over a limit, the run stops with the figures.

    mean_gap: mean |difference| of the log-probabilities over sampled tokens. every: check each n-th step (the first
    one always); the figures are logged at every step.
    """

    mean_gap: PositiveFloat = 0.02
    every: PositiveInt = 1


class OptimizerConfig(StrictModel):
    """adamw: everything by AdamW at `lr`. muon: hidden matrices by Muon at `muon_lr`, the rest by AdamW at `lr`.

    adamw8bit: AdamW with its two moments in 8 bits, in blocks of 256 (bitsandbytes; tensors below 4,096 numbers stay in
    float32), a quarter of the memory; the embedding's too.
    fused: one kernel for all of AdamW's tensors; the same figures to rounding, less time.
    """

    name: Literal["adamw", "adamw8bit", "muon"] = "adamw"
    lr: PositiveFloat = 1e-5
    muon_lr: PositiveFloat = 0.02
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_share: Share = 0.05
    final_lr_share: Share = 0.0
    fused: bool = False


class CheckpointConfig(StrictModel):
    """every: save after each n-th step, and after the last. keep: newest complete ones kept.

    Besides these, `keep_steps` and the one that validation found best are kept.
    """

    every: PositiveInt = 25
    keep: PositiveInt = 2
    keep_steps: tuple[int, ...] = ()


class ValidationConfig(StrictModel):
    """Held-out questions that the run is judged on after each n-th step and the last, and `best` selected by.

    every: 0 for never. at_start: also before the first step, as what to compare with. benchmark "questions":
    `questions` over `databases`, as in `data`; "toy": the generator's held-out split. name: what the figures call the
    set. sample: that many of its questions, drawn by the run's seed (0: all). modes: each question is asked once in
    each; the official accuracy in the first selects. Sampling and fallback are the evaluation's, budgets the run's.
    """

    every: NonNegativeInt = 0
    at_start: bool = True
    benchmark: Literal["questions", "toy"] = "questions"
    name: str = "held-out questions"
    questions: Path | None = None
    databases: Path | None = None
    toy_databases: PositiveInt = 20
    toy_questions: PositiveInt = 200
    sample: NonNegativeInt = 256
    modes: Annotated[tuple[Literal["withheld", "full"], ...], Field(min_length=1)] = ("withheld", "full")
    temperature: NonNegativeFloat = 0.6
    top_p: Share = 0.95
    top_k: NonNegativeInt = 20
    fallback: bool = True

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.every and self.benchmark == "questions" and (self.questions is None or self.databases is None):
            raise ValueError("validation.every needs the keys validation.questions and validation.databases")
        if len(set(self.modes)) < len(self.modes):
            raise ValueError("validation.modes names a mode twice")
        return self


class LogConfig(StrictModel):
    """Where figures go besides metrics.jsonl, which is always written; see train/trackers.py. They cannot stop a run.

    trackers: any of tensorboard, wandb (offline unless WANDB_MODE says otherwise), trackio; each is its own package.
    """

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    project: str = "execplan"


class TrainConfig(StrictModel):
    """One GRPO run. `output` is its folder; a run that finds complete checkpoints there continues from the newest.

    parallel: ddp keeps the model, its gradients and the optimizer whole on every rank, fsdp spreads each tensor of them
    over the ranks. Checkpoints are the same, so a run may change over.
    """

    output: Path
    seed: NonNegativeInt = 0
    steps: PositiveInt = 1000
    planned_steps: NonNegativeInt = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    threads: NonNegativeInt = 0
    sample_episodes_every: NonNegativeInt = 25
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    loss: LossConfig = LossConfig()
    gate: GateConfig = GateConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _sampling_matches_the_ratio(self) -> Self:
        rollout = self.rollout
        unmodified = rollout.temperature == 1.0 and rollout.top_p == 1.0 and rollout.top_k == 0
        if self.loss.ratio != "none" and not unmodified:
            raise ValueError(
                "loss.ratio compares full-softmax log-probabilities: it needs rollout.temperature 1, top_p 1, top_k 0 "
                f"(got {rollout.temperature}, {rollout.top_p}, {rollout.top_k}), or loss.ratio: none"
            )
        if rollout.max_new_tokens > rollout.max_tokens:
            raise ValueError("rollout.max_new_tokens exceeds the episode's budget rollout.max_tokens")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        fsdp, lora, offload = self.parallel == "fsdp", bool(self.model.lora), self.loss.kl.offload
        for unfit, why in (
            (fsdp and offload, "parallel: fsdp spreads the reference over the ranks; set loss.kl.offload: false"),
            (fsdp and self.optimizer.name != "adamw", "parallel: fsdp needs optimizer.name: adamw"),
            (fsdp and lora, "model.lora trains so little that there is nothing to spread; use parallel: ddp"),
            (lora and offload, "model.lora has no second model for a reference; set loss.kl.offload: false"),
        ):
            if unfit:
                raise ValueError(why)
        return self

    @property
    def schedule_steps(self) -> int:
        """Steps that the learning-rate schedule spans: `planned_steps`, or `steps` where that is 0."""
        return self.planned_steps or self.steps


def load_train_config(path: Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The config in `path` with overrides, checked as far as it can be without loading anything.

    Raises SetupError naming the key, or the missing local file or folder.
    """
    config = load_config(path, TrainConfig, overrides)
    read = {"data": config.data} | ({"validation": config.validation} if config.validation.every else {})
    for (section, part), key in product(read.items(), ("questions", "databases")):
        if (local := getattr(part, key)) is not None and not local.exists():
            raise SetupError(
                f"{section}.{key}: {local} does not exist; download the benchmark or correct the path in {path}"
            )
    return config
