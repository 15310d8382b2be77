"""Log-probabilities of chosen tokens without ever holding the logits of a whole sequence.

At a vocabulary of 248,320 the float32 logits of 24,576 positions are 22.7 GiB, and autograd would keep
several copies. `selected_logprobs` walks the positions in chunks, keeps one number a position (the
log-sum-exp) and recomputes a chunk's logits in the backward pass, where the weight's gradient is
accumulated in place. Its peak beyond inputs and gradients is one chunk of logits in float32, in bfloat16 two and a half
chunks of them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _SelectedLogprobs(torch.autograd.Function):
    """log_softmax(hidden @ weight.T)[n, targets[n]], chunk by chunk; see `selected_logprobs`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        picked = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(picked)
        for part, logits in _logits(hidden, weight, chunk):
            picked[part] = logits.gather(1, targets[part, None]).squeeze(1)
            largest = logits.amax(1, keepdim=True)
            log_sums[part] = logits.sub_(largest).exp_().sum(1).log_().add_(largest.squeeze(1))
        ctx.save_for_backward(hidden, weight, targets, log_sums)
        ctx.chunk = chunk
        return picked - log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, log_sums = ctx.saved_tensors
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # Accumulated in float32: dozens of chunks added up in bfloat16 would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        for part, grad_logits in _logits(hidden, weight, ctx.chunk):
            # d logp / d logits = onehot - softmax
            grad_logits.sub_(log_sums[part, None]).exp_().mul_(-grad_output[part, None])
            grad_logits.scatter_add_(1, targets[part, None], grad_output[part, None].float())
            in_dtype = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = in_dtype @ weight
            if grad_weight is not None:
                if weight.dtype == torch.float32:
                    grad_weight.addmm_(in_dtype.T, hidden[part])
                else:
                    grad_weight.add_(in_dtype.T @ hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _logits(hidden: Tensor, weight: Tensor, chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, their logits in float32), a chunk at a time; what is yielded is overwritten by the next, in one buffer."""
    n = hidden.shape[0]
    buffer = hidden.new_empty(min(chunk, n), weight.shape[0])
    for start in range(0, n, chunk):
        part = slice(start, min(start + chunk, n))
        yield part, torch.mm(hidden[part], weight.T, out=buffer[: part.stop - start]).float()


def selected_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 512) -> Tensor:
    """Natural log-probability of each target under softmax(hidden @ weight.T) at temperature 1.

    Args:
        hidden: (N, H) final hidden states, any float dtype; products are taken in it, sums in float32.
        weight: (V, H) output projection, cast to hidden's dtype if it differs (autograd casts its gradient back).
        targets: (N,) int64 ids in [0, V).
        chunk: positions at a time; the peak is chunk x V x 4 bytes, in bfloat16 twice that. A small one costs time:
            each reads the weight three times and its gradient once.

    Returns: (N,) float32.
    """
    if weight.dtype != hidden.dtype:
        weight = weight.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        return _SelectedLogprobs.apply(hidden, weight, targets, chunk)


class LogprobModel(nn.Module):
    """A causal language model as a module from token ids to log-probabilities of its own tokens.

    It is a module, not a function, so that DDP and FSDP can wrap it: their hooks fire in `forward`.
    """

    def __init__(self, model: nn.Module, chunk: int = 512) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of ids[b, t] given ids[b, :t] wherever `mask` is set, 0 elsewhere.

        Padding is on the right, where a causal model cannot see it from a real position, be it by attention or
        by a recurrent state: so no attention mask is needed, and the fast kernels stay available.

        Args:
            ids: (B, T) int64, rows padded on the right with any valid id.
            mask: (B, T) bool, false on padding. Position 0 has no context and is never computed.

        Returns: (B, T) float32. Only masked positions are projected to the vocabulary.
        """
        hidden = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state  # type: ignore[operator]
        if torch.is_autocast_enabled(hidden.device.type):
            # The residual stream stays float32 under autocast; the largest product of all should not.
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        wanted = mask[:, 1:]
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        picked = selected_logprobs(hidden[:, :-1][wanted], head.weight, ids[:, 1:][wanted], self.chunk)
        result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
        result[:, 1:] = torch.zeros_like(result[:, 1:]).masked_scatter(wanted, picked)
        return result
