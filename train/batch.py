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


def plan_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of rows, longest first, in groups whose padded size (rows x longest) is at most `budget` tokens.

    A row longer than the budget goes alone. The longest group comes first, so that memory that does not
    suffice is found out at once.

    >>> plan_micro_batches([5, 9, 2, 4], 10)
    [[1], [0, 3], [2]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for index in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


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
