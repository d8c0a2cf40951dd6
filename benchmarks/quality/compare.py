"""How far one model's distributions are from another's, position by position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

#: Nats between the first and the second id of the reference; a flip above it is a defect of a format.
DEFECT_MARGIN = 0.5


@dataclass
class Distance:
    """Of every position: the divergence, the loss of both models, and the reference's margin where the first ids
    differ.
    """

    divergences: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    reference_losses: list[torch.Tensor] = field(default_factory=list)
    flip_margins: list[torch.Tensor] = field(default_factory=list)

    def add(self, reference: torch.Tensor, other: torch.Tensor, next_ids: Sequence[int]) -> None:
        """Add logits [P, V] of both at the same positions, and the ids that stand there."""
        expected, found = (torch.log_softmax(logits.double(), -1) for logits in (reference, other))
        ids = torch.tensor(next_ids).unsqueeze(1)
        self.divergences.append((expected.exp() * (expected - found)).sum(-1))
        self.reference_losses.append(-expected.gather(1, ids).squeeze(1))
        self.losses.append(-found.gather(1, ids).squeeze(1))
        best = expected.topk(2, -1)
        flipped = found.argmax(-1) != best.indices[:, 0]
        self.flip_margins.append((best.values[:, 0] - best.values[:, 1])[flipped])

    @property
    def num_positions(self) -> int:
        return sum(map(len, self.divergences))

    @property
    def mean_divergence(self) -> float:
        return float(torch.cat(self.divergences).mean())

    def divergence_at(self, share: float) -> float:
        """Return the quantile of the divergences, in nats."""
        ordered = torch.cat(self.divergences).sort().values
        return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])

    @property
    def perplexity(self) -> float:
        return float(torch.cat(self.losses).mean().exp())

    @property
    def reference_perplexity(self) -> float:
        return float(torch.cat(self.reference_losses).mean().exp())

    @property
    def perplexity_ratio(self) -> float:
        return self.perplexity / self.reference_perplexity

    @property
    def flips(self) -> torch.Tensor:
        """The reference's margins where the first ids differ."""
        return torch.cat(self.flip_margins)

    @property
    def num_defects(self) -> int:
        return int((self.flips > DEFECT_MARGIN).sum())


def first_differences(expected: Iterable[Sequence[int]], found: Iterable[Sequence[int]]) -> list[int]:
    """Return for each pair the index of the first id that differs; its length if none does."""
    return [
        next((at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other), len(first))
        for first, second in zip(expected, found, strict=True)
    ]
