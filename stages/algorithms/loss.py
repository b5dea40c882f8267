"""What a loss returns: sums and counts that add up over micro-batches and ranks, and are divided once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stages.algorithms.masked import masked_sum

Metrics = dict[str, tuple[Tensor, Tensor]]
"""name -> (sum, count), detached float64 scalars."""


def metric(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, count) of a quantity that is only watched: masked_sum, detached, in float64."""
    return masked_sum(x.detach().double(), mask)


def add_metrics(left: Metrics, right: Metrics) -> Metrics:
    """Sums and counts of both, by name; a name that one side lacks counts as (0, 0) there."""
    names = [*left, *(name for name in right if name not in left)]
    parts = {name: [side[name] for side in (left, right) if name in side] for name in names}
    return {name: (sum(s for s, _ in pairs), sum(c for _, c in pairs)) for name, pairs in parts.items()}


def divide_metrics(metrics: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The one division: name -> sum / count. A name whose count is 0 is left out: nothing was seen, which is not 0."""
    return {name: float(total) / float(count) for name, (total, count) in metrics.items() if float(count) != 0}


@dataclass(frozen=True)
class Loss:
    """Part of a loss: of one micro-batch, or of several added together."""

    sum: Tensor
    """Scalar, differentiable: the loss summed over tokens or rows."""
    count: Tensor
    """Scalar float64: tokens or row weights that the sum of the whole step is divided by."""
    metrics: Metrics = field(default_factory=dict)
    """name -> (sum, count), detached; add, then divide once."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """name -> largest value seen, detached; not a mean, so it joins by maximum."""

    def __add__(self, other: Loss) -> Loss:
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value
        return Loss(self.sum + other.sum, self.count + other.count, add_metrics(self.metrics, other.metrics), maxima)

    def mean(self) -> Tensor:
        """sum / count, differentiable; 0 when the count is 0. Right only for the Loss of a whole step."""
        return self.sum / torch.where(self.count > 0, self.count, 1.0).to(self.sum.dtype)
