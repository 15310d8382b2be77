"""Episodes as training rows, and rows as micro-batches of bounded size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainRow:
    """One episode as the loss sees it: ids, mask and sampler log-probabilities of equal length, and its advantage."""

    ids: Sequence[int]
    mask: Sequence[int]
    sampler_logprobs: Sequence[float]
    advantage: float

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.mask) == len(self.sampler_logprobs):
            raise ValueError(f"unequal lengths: {len(self.ids)}, {len(self.mask)}, {len(self.sampler_logprobs)}")


@dataclass(frozen=True)
class MicroBatch:
    """Rows padded on the right: ids (B, T) int64, mask (B, T) bool, log-probs (B, T), advantages (B,)."""

    ids: Tensor
    mask: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor

    def to(self, device: torch.device) -> "MicroBatch":
        return MicroBatch(
            self.ids.to(device), self.mask.to(device), self.sampler_logprobs.to(device), self.advantages.to(device)
        )


# What one more forward and backward pass costs besides its tokens, in tokens.
PASS_OVERHEAD = 256


def plan_micro_batches(lengths: Sequence[int], budget: int, overhead: int = PASS_OVERHEAD) -> list[list[int]]:
    """Indices of rows, longest first, in groups whose padded size (rows x longest) is at most `budget` tokens.

    Of all ways to cut the sorted rows into such groups, the one with the least padded tokens + `overhead` x groups:
    lengths within a step differ tenfold, and filling groups up to the budget would compute mostly padding. A row
    longer than the budget goes alone. The longest comes first: memory that does not suffice is found out at once.

    >>> plan_micro_batches([5, 9, 2, 4], 10, overhead=2)
    [[1], [0, 3], [2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # cost[end]: least cost of the first `end` rows; cut[end]: where the last group of that plan starts.
    cost, cut = [0], [0]
    for end in range(1, len(order) + 1):
        best, at = cost[end - 1] + lengths[order[end - 1]] + overhead, end - 1
        for start in range(end - 2, -1, -1):
            padded = lengths[order[start]] * (end - start)
            if padded > budget:
                break  # longer rows and more of them only get larger
            if cost[start] + padded + overhead < best:
                best, at = cost[start] + padded + overhead, start
        cost.append(best)
        cut.append(at)
    groups: list[list[int]] = []
    end = len(order)
    while end:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return groups[::-1]


def collate(rows: Sequence[TrainRow]) -> MicroBatch:
    """Pad rows on the right to the longest of them (id 0, mask 0, log-prob 0)."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    sampler = torch.zeros(len(rows), width, dtype=torch.float32)
    for b, row in enumerate(rows):
        n = len(row.ids)
        ids[b, :n] = torch.tensor(row.ids, dtype=torch.long)
        mask[b, :n] = torch.tensor(row.mask, dtype=torch.bool)
        sampler[b, :n] = torch.tensor(row.sampler_logprobs, dtype=torch.float32)
    return MicroBatch(ids, mask, sampler, torch.tensor([row.advantage for row in rows], dtype=torch.float32))
