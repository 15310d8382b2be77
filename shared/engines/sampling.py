"""Choosing the next token from logits, reproducibly and row by row."""

import numpy as np
import torch

from shared.engines.base import SamplingParams


def draw_uniforms(seed: int, count: int) -> np.ndarray:
    """`count` uniform numbers in [0, 1) that depend on `seed` alone: one a sampled token."""
    return np.random.Generator(np.random.Philox(key=seed & (2**64 - 1))).random(count)


def sample_tokens(
    logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]
) -> tuple[list[int], list[float]]:
    """One token a row, and its log-probability under the full softmax at temperature 1.

    logits: (rows, vocabulary). A row is sampled by inverting the distribution function of its truncated,
    renormalized distribution at `uniforms[row]`, so that a row's token does not depend on the other rows.
    Truncation is the usual order: temperature, then top-k, then top-p over what is left.
    """
    logits = logits.float()
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    groups: dict[tuple[float, float, int], list[int]] = {}
    for row, p in enumerate(params):
        groups.setdefault((p.temperature, p.top_p, p.top_k), []).append(row)
    for (temperature, top_p, top_k), rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        group = logits if len(rows) == len(params) else logits[index]
        if temperature == 0:
            tokens[index] = group.argmax(dim=-1)
            continue
        probs = truncated_probs(group / temperature, top_p, top_k)
        cumulative = probs.double().cumsum(dim=-1)
        u = torch.tensor([uniforms[row] for row in rows], dtype=torch.double, device=logits.device)
        # The largest double below 1 keeps the threshold under the total, so a token is always found.
        threshold = u.clamp(max=1 - 2**-53)[:, None] * cumulative[:, -1:]
        tokens[index] = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def truncated_probs(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """(rows, vocabulary) probabilities: the top `top_k` (0 = all), then the smallest set of mass >= `top_p`.

    The most likely token always stays. The rows are renormalized only up to a factor: the caller scales by the total.
    """
    if top_k > 0 and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = torch.softmax(logits, dim=-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        beyond = before >= top_p
        beyond[:, 0] = False
        ordered = ordered.masked_fill(beyond, 0.0)
        probs = torch.zeros_like(probs).scatter_(1, order, ordered)
    return probs
