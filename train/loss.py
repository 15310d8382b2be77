"""The GRPO objective of the recipe, as pure functions over tensors.

For one optimizer step over E usable episodes (all ranks together), with sampled tokens t of episode i:

    advantage   A_i = reward_i - mean of the rewards of i's group                 (not divided by their std)
    ratio       r_i = exp( mean over sampled t of (logp_it - sampler_logp_it) )   (one number an episode)
    surrogate   s_i = min(r_i A_i, clip(r_i, 1 - 0.2, 1 + 0.28) A_i)
    k3          d_it = exp(ref_it - logp_it) - (ref_it - logp_it) - 1             (>= 0; estimates KL(policy || ref))

    loss = 1/(1024 E) * sum_i sum_{sampled t} ( -s_i + beta d_it )

Every token of an episode carries the episode's surrogate, so a long episode weighs by its length; the
constant 1024 takes the place of a length that depends on the batch (Dr. GRPO), and E is the number of
usable episodes of the step *before* groups without signal are left out: leaving those out saves their
computation and changes nothing but their KL term. Sums over tokens and a constant denominator are also what
makes the loss the same under any micro-batch split, padding, order of episodes or number of ranks.

Tool results, prompts and padding have mask 0 and enter neither numerator, denominator nor ratio.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossSettings:
    """The constants of the objective; the defaults are the recipe's."""

    token_constant: float = 1024.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    use_ratio: bool = True


@dataclass(frozen=True)
class LossOutput:
    """`loss` is a scalar to call backward on; the rest is detached, one value an episode (B,) unless said otherwise.

    `log_ratio` is the masked mean of logp - sampler_logp; `clipped` marks episodes whose surrogate is the
    clipped branch (no policy gradient); `kl_sum` and `gap_sum` are sums over sampled tokens of k3 and of
    |logp - sampler_logp|, `gap_max` the largest such gap (scalar), and `n_tokens` the number of sampled tokens.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    kl_sum: Tensor
    gap_sum: Tensor
    gap_max: Tensor
    n_tokens: Tensor


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward minus the group's mean, for the candidates of one question; not divided by the standard deviation.

    >>> group_advantages([3.0, 0.0, 0.0, 1.0])
    [2.0, -1.0, -1.0, 0.0]
    """
    if not rewards:
        return []
    # All-equal groups must give exact zeros: a mean of equal floats can be off by one rounding.
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` (B, T) over the positions of each row where `mask` (B, T) is set; 0 for a row without any.

    Masked-out values may be anything, NaN and infinity included.
    """
    return _only(mask, values).sum(-1) / mask.sum(-1).clamp(min=1)


def sequence_log_ratio(logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Length-normalized log importance ratio of each episode, (B,): mean over sampled tokens of logp - sampler_logp.

    The sampler's own log-probabilities stand for the old policy, so a mismatch between the two programs that
    compute them is corrected as well, and a one-sided rounding of 0.001 a token gives a ratio of
    1.001 at any length (a product over 4,000 tokens would give 55).
    """
    return masked_mean(logprobs - sampler_logprobs, mask)


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference) a token: exp(d) - d - 1 with d = ref - logp; never negative."""
    difference = reference_logprobs - logprobs
    return torch.expm1(difference) - difference


def grpo_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    n_episodes: int,
    *,
    reference_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
    settings: LossSettings | None = None,
) -> LossOutput:
    """The objective of this module's docstring for one micro-batch; the losses of a step's micro-batches add up.

    Args:
        logprobs: (B, T) log-probabilities under the policy, with gradient.
        sampler_logprobs: (B, T) what the sampler recorded for the same tokens.
        mask: (B, T) bool, true on sampled tokens alone.
        advantages: (B,).
        n_episodes: E, usable episodes of the whole step over all ranks.
        reference_logprobs: (B, T) under the frozen start, or None for no KL term.
        kl_coefficient: beta.
        settings: the constants; None for the recipe's.
    """
    settings = settings or LossSettings()
    if n_episodes <= 0:
        raise ValueError("n_episodes must be positive: a step without usable episodes has no loss")
    # What is masked out may be anything, NaN included: it must not reach a product, in value or in gradient.
    logprobs, sampler_logprobs = _only(mask, logprobs), _only(mask, sampler_logprobs)
    n_tokens = mask.sum(-1)
    log_ratio = sequence_log_ratio(logprobs, sampler_logprobs, mask)
    # Without the ratio the value is 1 and the gradient that of log-probabilities: plain REINFORCE with a baseline.
    effective = log_ratio if settings.use_ratio else _gradient_only(masked_mean(logprobs, mask))
    ratio = effective.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    surrogate = torch.minimum(unclipped, clipped)
    total = -(surrogate * n_tokens).sum()

    kl_sum = torch.zeros_like(log_ratio)
    if reference_logprobs is not None:
        kl_sum = k3(logprobs, _only(mask, reference_logprobs)).sum(-1)
        if kl_coefficient != 0.0:
            total = total + kl_coefficient * kl_sum.sum()

    gap = (logprobs - sampler_logprobs).detach().abs()
    return LossOutput(
        loss=total / (settings.token_constant * n_episodes),
        log_ratio=log_ratio.detach(),
        clipped=(clipped < unclipped).detach(),
        kl_sum=kl_sum.detach(),
        gap_sum=gap.sum(-1),
        gap_max=gap.max() if gap.numel() else gap.new_zeros(()),
        n_tokens=n_tokens,
    )


def _only(mask: Tensor, values: Tensor) -> Tensor:
    """`values` where the mask is set, 0 without a gradient elsewhere."""
    return torch.where(mask, values, torch.zeros_like(values))


def _gradient_only(values: Tensor) -> Tensor:
    """Zero in value, `values` in gradient."""
    return values - values.detach()


@dataclass(frozen=True)
class KlSettings:
    """How the KL coefficient beta is set.

    mode "adaptive": beta starts at `coefficient` and follows `next_kl_coefficient` towards `target`, the mean k3
    a sampled token. mode "fixed": beta stays at `coefficient`. mode "off": no reference is kept.
    """

    mode: str = "adaptive"
    target: float = 0.005
    coefficient: float = 0.02
    gain: float = 0.1
    smallest: float = 1e-4
    largest: float = 1.0


def next_kl_coefficient(coefficient: float, measured_kl: float, settings: KlSettings) -> float:
    """Beta for the next step: the proportional controller of Ziegler et al. (2019, section 2.2).

        error = clip(measured / target - 1, -0.2, 0.2);   beta <- clip(beta (1 + gain error), smallest, largest)

    `gain` 0.1 gives at most 2% a step: a few dozen steps to double, so one odd batch cannot throw it.
    A measured KL that is not finite leaves beta as it is (the step itself is stopped elsewhere).
    """
    if settings.mode != "adaptive" or not -float("inf") < measured_kl < float("inf"):
        return coefficient
    error = min(max(measured_kl / settings.target - 1.0, -0.2), 0.2)
    return min(max(coefficient * (1.0 + settings.gain * error), settings.smallest), settings.largest)
