"""Learning rate over the steps of a run; pure Python."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_factor(
    step: int,
    *,
    kind: Literal["constant", "linear", "cosine"],
    warmup_steps: int = 0,
    total_steps: int | None = None,
    floor: float = 0.0,
) -> float:
    """Factor of the peak learning rate at a step, counted from 0.

    Rises linearly from 0 over warmup_steps; then stays at 1 (constant), or falls to `floor` at total_steps and stays
    there. total_steps: the explicit horizon, so that a run may be extended. floor: fraction of the peak.
    Raises ValueError for a negative step, an unknown kind, a floor outside [0, 1], a horizon that does not exceed the
    warm-up, or an option that the kind does not read. Loshchilov and Hutter 2017, eq. 5 (cosine).
    """
    if step < 0 or warmup_steps < 0:
        raise ValueError(f"step and warmup_steps must not be negative, not {step}, {warmup_steps}")
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"unknown schedule {kind!r}: constant, linear or cosine")
    if kind == "constant" and (total_steps is not None or floor != 0.0):
        raise ValueError("constant reads neither total_steps nor floor")
    if kind != "constant" and (total_steps is None or total_steps <= warmup_steps):
        raise ValueError(f"{kind} needs total_steps above warmup_steps={warmup_steps}, not {total_steps}")
    if not 0.0 <= floor <= 1.0:
        raise ValueError(f"floor must lie in [0, 1], not {floor}")
    if step < warmup_steps:
        return step / warmup_steps
    if total_steps is None:
        return 1.0
    progress = min((step - warmup_steps) / (total_steps - warmup_steps), 1.0)
    fall = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return floor + (1.0 - floor) * fall
