"""Mean and spread of a stream of numbers, added to batch by batch, in any grouping to the same result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Running:
    """Count, mean and sum of squared distances from it: the whole state."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def joined(self, values: Sequence[float]) -> Running:
        """With more values. Chan, Golub and LeVeque 1983, eq. 2.1."""
        if not values:
            return self
        n, mean = len(values), statistics.fmean(values)
        squares = math.fsum((v - mean) ** 2 for v in values)
        total, difference = self.count + n, mean - self.mean
        return Running(total, self.mean + difference * n / total, self.squares + squares + difference**2 * self.count * n / total)

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 where there is no spread yet."""
        spread = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return spread if spread > 0 else 1.0
