"""Loss and gradients against TRL's GRPOTrainer on the same batch, where the two formulas coincide.

They do with loss_type dr_grpo (sum over tokens / (episodes x max_completion_length)), max_completion_length 1024,
importance_sampling_level sequence, the sampler's log-probabilities passed as the old ones, and k3 as it is (TRL by
default multiplies it by the ratio, which is not the recipe's formula).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from train.batch import MicroBatch
from train.logprobs import LogprobModel
from train.loss import grpo_loss

PROMPT, COMPLETION, BETA = 5, 24, 0.04


def _batch(policy: LogprobModel, seed: int) -> tuple[MicroBatch, torch.Tensor]:
    """Six episodes of prompt, sampled and tool tokens; sampler log-probs near the policy's; reference ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (6, PROMPT + COMPLETION), generator=generator)
    lengths = torch.tensor([24, 20, 24, 7, 15, 1])
    real = torch.arange(COMPLETION)[None] < lengths[:, None]
    sampled = (torch.rand(6, COMPLETION, generator=generator) < 0.7) & real
    sampled[:, 0] = True
    mask = torch.cat([torch.zeros(6, PROMPT, dtype=torch.bool), sampled], dim=1)
    with torch.no_grad():
        own = policy(ids, mask)
    # Wide enough that some episodes are clipped at either end.
    sampler = own + 0.4 * torch.randn(6, 1, generator=generator) + 0.1 * torch.randn(own.shape, generator=generator)
    reference = own + 0.3 * torch.randn(own.shape, generator=generator)
    advantages = torch.randn(6, generator=generator)
    return MicroBatch(ids, mask, sampler * mask, advantages), reference * mask


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("beta", [0.0, BETA])
def test_loss_and_gradients_equal_trl(
    tmp_path: Path, make_model: Callable[[], Any], tokenizer: Any, seed: int, beta: float
) -> None:
    ours, theirs = make_model(), make_model()
    policy = LogprobModel(ours, chunk=7)
    batch, reference = _batch(policy, seed)

    output = grpo_loss(
        policy(batch.ids, batch.mask),
        batch.sampler_logprobs,
        batch.mask,
        batch.advantages,
        len(batch.ids),
        reference_logprobs=reference,
        kl_coefficient=beta,
    )
    output.loss.backward()
    if seed == 0:
        assert output.clipped.any(), "the case must exercise clipping"
        assert not output.clipped.all()

    trl_loss = _trl_loss(theirs, tokenizer, batch, reference, beta, tmp_path)
    trl_loss.backward()

    assert output.loss.item() == pytest.approx(trl_loss.item(), rel=1e-4, abs=1e-7)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None, name
        assert other.grad is not None, name
        torch.testing.assert_close(mine.grad, other.grad, rtol=2e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def _trl_loss(
    model: Any, tokenizer: Any, batch: MicroBatch, reference: torch.Tensor, beta: float, folder: Path
) -> torch.Tensor:
    arguments = GRPOConfig(
        output_dir=str(folder),
        loss_type="dr_grpo",
        importance_sampling_level="sequence",
        epsilon=0.2,
        epsilon_high=0.28,
        use_bias_correction_kl=False,
        max_completion_length=1024,
        num_generations=2,
        per_device_train_batch_size=6,
        temperature=1.0,
        scale_rewards="none",
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["x"]}),
        processing_class=tokenizer,
    )
    model.train()
    lengths = batch.mask.long().flip(1).argmax(1)
    columns = torch.arange(batch.ids.shape[1])[None]
    real = columns < (batch.ids.shape[1] - lengths)[:, None]
    inputs = {
        "prompt_ids": batch.ids[:, :PROMPT],
        "prompt_mask": torch.ones_like(batch.ids[:, :PROMPT]),
        "completion_ids": batch.ids[:, PROMPT:],
        "completion_mask": real[:, PROMPT:].long(),
        "tool_mask": batch.mask[:, PROMPT:].long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.sampler_logprobs[:, PROMPT:],
        "ref_per_token_logps": reference[:, PROMPT:],
        "num_items_in_batch": torch.tensor(float(batch.mask.sum())),
    }
    trainer.current_gradient_accumulation_steps = 1
    # Set afterwards: with a beta the constructor wants to load a reference model by name; its log-probs are given here.
    trainer.beta = beta
    loss: torch.Tensor = trainer._compute_loss(model, inputs)
    return loss
