"""The optimizer step of GRPO: rows with advantages in, updated weights and figures out.

Rows are split into micro-batches by a token budget and their losses add up (train/loss.py), so the split, the
padding and the number of ranks do not change the gradient. With several ranks each takes its own rows; DDP (or FSDP,
train/sharding.py) adds the gradients in the backward pass, and a rank with fewer micro-batches (or none)
fills up with empty ones, so that all ranks make the same collective calls.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from shared.errors import SetupError
from train.batch import MicroBatch, TrainRow, collate, plan_micro_batches
from train.config import TrainConfig
from train.live import whole
from train.logprobs import LogprobModel
from train.lora import without_adapters
from train.loss import KlSettings, LossOutput, LossSettings, grpo_loss, next_kl_coefficient
from train.optim import build_optimizers, lr_scale
from train.sharding import is_sharded, shard
from train.weight_sync import fingerprint


@dataclass
class StepSums:
    """Sums over the micro-batches of one rank; `log_ratios` has one entry an episode."""

    loss: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    tokens: int = 0
    clipped: int = 0
    log_ratios: list[float] = field(default_factory=list)

    def add(self, output: LossOutput) -> None:
        self.loss += output.loss.item()
        self.kl += output.kl_sum.sum().item()
        self.gap += output.gap_sum.sum().item()
        self.gap_max = max(self.gap_max, output.gap_max.item())
        self.tokens += int(output.n_tokens.sum())
        self.clipped += int(output.clipped.sum())
        self.log_ratios += output.log_ratio.tolist()

    def merge(self, other: "StepSums") -> None:
        self.loss += other.loss
        self.kl += other.kl
        self.gap += other.gap
        self.gap_max = max(self.gap_max, other.gap_max)
        self.tokens += other.tokens
        self.clipped += other.clipped
        self.log_ratios += other.log_ratios


class AdaptersOff:
    """The frozen start inside a model with adapters: `LogprobModel` without them."""

    def __init__(self, policy: LogprobModel) -> None:
        self._policy = policy

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """As `LogprobModel.forward`. Not through DDP: nothing here has a gradient."""
        with without_adapters(self._policy.model):
            values: Tensor = self._policy(ids, mask)
        return values


class Trainer:
    """The policy, its optimizer and the frozen reference. `model` stays usable for sampling between steps."""

    def __init__(
        self, config: TrainConfig, model: nn.Module, reference: nn.Module | None, accelerator: Accelerator
    ) -> None:
        """`reference` is the frozen start; None is right only with loss.kl.mode off, or with adapters on `model`."""
        with_kl, adapted = config.loss.kl.mode != "off", config.model.lora is not None
        if (reference is not None) != (with_kl and not adapted):
            raise ValueError("a reference model is needed with loss.kl.mode on, and not with model.lora")
        self.config = config
        self.accelerator = accelerator
        self.device = accelerator.device
        self.model = model
        self.plain = LogprobModel(self.model, config.loss.logprob_chunk)
        self.reference: LogprobModel | AdaptersOff | None = None
        if reference is not None:
            self.reference = LogprobModel(reference.eval().requires_grad_(False), config.loss.logprob_chunk)
        elif with_kl:
            self.reference = AdaptersOff(self.plain)
        self._place()
        self.optimizers = build_optimizers(self.model, config.optimizer)
        self.loss_settings = LossSettings(
            config.loss.token_constant, config.loss.clip_low, config.loss.clip_high, config.loss.ratio == "sequence"
        )
        kl = config.loss.kl
        self.kl_settings = KlSettings(kl.mode, kl.target, kl.coefficient, kl.gain, kl.smallest, kl.largest)
        self.kl_coefficient = kl.coefficient if with_kl else 0.0
        self.weights = fingerprint(self.model)

    def _place(self) -> None:
        """Put policy and reference where the run's layout over ranks and devices wants them."""
        if self.config.parallel == "fsdp":
            for part in (self.plain, self.reference):
                if isinstance(part, LogprobModel):
                    shard(part, part.model.get_decoder(), self.accelerator)  # type: ignore[operator]
            self.policy: nn.Module = self.plain
            return
        self.model.to(self.device)
        self.policy = self.accelerator.prepare_model(self.plain)
        if isinstance(self.reference, LogprobModel):
            self.reference.to("cpu" if self.config.loss.kl.offload else self.device)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """What every forward pass of the run happens under, the sampler's included."""
        if self.config.model.autocast == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def update(
        self,
        rows: Sequence[TrainRow],
        n_episodes: int,
        step: int,
        poll: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """One GRPO step on this rank's rows; all ranks call it, and all get the figures over all ranks.

        Args:
            rows: this rank's rows; possibly none.
            n_episodes: usable episodes of the step over all ranks, those of groups left out included.
            step: optimizer steps done before this one.
            poll: called between micro-batches; may raise to abandon the step (single process only).

        Without rows on any rank nothing is updated, and "empty" is 1. Raises SetupError when the log-prob
        gate trips, FloatingPointError when loss or gradient is not finite; the weights are untouched then.
        """
        micro_batches = self._micro_batches(rows)
        if not micro_batches:
            return {"empty": 1.0, "kl_coefficient": self.kl_coefficient}
        scale = lr_scale(step, self.config.schedule_steps, self.config.optimizer)
        self.optimizers.set_scale(scale)
        figures: dict[str, float] = {"empty": 0.0, "lr": scale * self.config.optimizer.lr}
        self.model.train(self.config.model.gradient_checkpointing)
        references = self._offloaded_reference(micro_batches) if self.config.loss.kl.offload else None
        for epoch in range(self.config.loss.inner_epochs):
            self.optimizers.zero_grad()
            sums = self._accumulate(micro_batches, n_episodes, poll, references)
            norm = self._clip_gradients()
            if epoch == 0:
                figures |= _figures(sums) | {"grad_norm": norm, "kl_coefficient": self.kl_coefficient}
                self._check_gate(figures, step)
            if not (torch.tensor(norm).isfinite() and torch.tensor(sums.loss).isfinite()):
                raise FloatingPointError(f"step {step}: loss {sums.loss}, gradient norm {norm}; the step was not taken")
            self.optimizers.step()
        self.optimizers.zero_grad()
        self.model.eval()
        self.kl_coefficient = next_kl_coefficient(self.kl_coefficient, figures["kl"], self.kl_settings)
        self.weights = fingerprint(self.model)
        return figures

    def _micro_batches(self, rows: Sequence[TrainRow]) -> list[MicroBatch | None]:
        """This rank's micro-batches, filled up with None to the largest number any rank has."""
        plan = plan_micro_batches([len(row.ids) for row in rows], self.config.loss.micro_batch_tokens)
        batches: list[MicroBatch | None] = [collate([rows[i] for i in indices]) for indices in plan]
        largest = max(gather_object([len(batches)]))
        return batches + [None] * (largest - len(batches))

    def _accumulate(
        self,
        micro_batches: Sequence[MicroBatch | None],
        n_episodes: int,
        poll: Callable[[], None],
        references: Sequence[Tensor | None] | None = None,
    ) -> StepSums:
        """Forward and backward over all micro-batches; returns the sums over all ranks.

        `references` has the reference's log-probs for each micro-batch, or is None to compute them here.
        """
        sums = StepSums()
        ranks = self.accelerator.num_processes
        for index, batch in enumerate(micro_batches):
            poll()
            last = index == len(micro_batches) - 1
            # Sharded gradients are reduced at once: keeping them whole would give up what sharding saves.
            synced = contextlib.nullcontext() if last else self.accelerator.no_sync(self.policy)
            with synced:
                if batch is None:
                    self.accelerator.backward(self._idle_loss())
                    continue
                known = references[index] if references is not None else None
                output = self._loss(batch.to(self.device), n_episodes, known)
                sums.add(output)
                # DDP averages over ranks, and the loss is already divided by the episodes of all of them.
                self.accelerator.backward(output.loss * ranks)
        merged = StepSums()
        for part in gather_object([sums]):
            merged.merge(part)
        return merged

    @torch.no_grad()
    def _offloaded_reference(self, micro_batches: Sequence[MicroBatch | None]) -> list[Tensor | None]:
        """The reference's log-probs of every micro-batch; it is on the device only while this runs."""
        values: list[Tensor | None] = [None] * len(micro_batches)
        if not isinstance(self.reference, LogprobModel):
            return values
        self.reference.to(self.device)
        for index, batch in enumerate(micro_batches):
            if batch is not None:
                moved = batch.to(self.device)
                with self.autocast():
                    values[index] = self.reference(moved.ids, moved.mask)
        self.reference.to("cpu")
        return values

    def _loss(self, batch: MicroBatch, n_episodes: int, reference: Tensor | None) -> LossOutput:
        with self.autocast():
            if self.reference is not None and reference is None:
                with torch.no_grad():
                    reference = self.reference(batch.ids, batch.mask)
            logprobs = self.policy(batch.ids, batch.mask)
        return grpo_loss(
            logprobs,
            batch.sampler_logprobs,
            batch.mask,
            batch.advantages,
            n_episodes,
            reference_logprobs=reference,
            kl_coefficient=self.kl_coefficient,
            settings=self.loss_settings,
        )

    def _idle_loss(self) -> Tensor:
        """A loss of 0 that touches every parameter, for a rank that has run out of rows."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        with self.autocast():
            if isinstance(self.reference, LogprobModel) and is_sharded(self.reference):
                with torch.no_grad():
                    self.reference(ids, mask)  # the other ranks gather it now
            logprobs = self.policy(ids, mask)
        return 0.0 * logprobs.sum()

    def _clip_gradients(self) -> float:
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        return float(whole(norm))

    def _check_gate(self, figures: dict[str, float], step: int) -> None:
        gate = self.config.gate
        if step % gate.every == 0 and not figures["gap_mean"] <= gate.mean_gap:
            raise SetupError(
                f"log-prob gate, step {step}: mean |trainer - sampler| is {figures['gap_mean']:.5f} over "
                f"{figures['train_tokens']:.0f} sampled tokens (largest {figures['gap_max']:.3f}), "
                f"the limit gate.mean_gap is {gate.mean_gap}: the sampler does not run the weights or the precision "
                "that the trainer does"
            )

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """The policy's log-probabilities of each row's ids (0 where not sampled), in the order of `rows`."""
        result: dict[int, Tensor] = {}
        for indices in plan_micro_batches([len(row.ids) for row in rows], self.config.loss.micro_batch_tokens):
            batch = collate([rows[i] for i in indices]).to(self.device)
            with self.autocast():
                # Not through DDP: ranks may call this a different number of times. (Sharded ones may not.)
                values = self.plain(batch.ids, batch.mask).cpu()
            for b, i in enumerate(indices):
                result[i] = values[b, : len(rows[i].ids)]
        return [result[i] for i in range(len(rows))]


def _figures(sums: StepSums) -> dict[str, float]:
    """Means from the sums of a step: KL and gap a sampled token, ratio statistics an episode, before clipping."""
    tokens = max(sums.tokens, 1)
    ratios = torch.tensor(sums.log_ratios, dtype=torch.float64).exp()
    return {
        "loss": sums.loss,
        "kl": sums.kl / tokens,
        "gap_mean": sums.gap / tokens,
        "gap_max": sums.gap_max,
        "ratio_mean": ratios.mean().item(),
        "ratio_min": ratios.min().item(),
        "ratio_max": ratios.max().item(),
        "clipped": sums.clipped / len(sums.log_ratios),
        "train_tokens": float(sums.tokens),
        "train_episodes": float(len(sums.log_ratios)),
    }
