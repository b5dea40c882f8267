"""What a driver tells trainer ranks: where weights come from, and how they are trained. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """Weights of an artifact. Ranks that already hold `state_id` for a role use them; others load the folder."""

    state_id: str
    folder: str
    kind: str
    """causal or scorer."""
    precision: str = "float32"
    seed: int = 0
    """Of a head that the folder lacks."""
    optimizer: str | None = None
    """The optimizer's state to go on from: its files without `.safetensors`; None starts a new optimizer."""


@dataclass(frozen=True)
class Recipe:
    """How to train: objective, its options, optimizer, order and length."""

    objective: str
    """`stages.algorithms.objectives.<file>:<class>`."""
    optimizer: dict[str, Any]
    """Fields of config_models.Optimizer."""
    epochs: int
    seed: int
    """Of the order of rows."""
    options: dict[str, Any] = field(default_factory=dict)
    first_step: int = 0
    """Steps taken before, on the schedule's clock."""
    total_steps: int | None = None
    """Length of the schedule; None: this training's own."""
    frozen_steps: int = 0
    """Steps on the schedule's clock for which the learning rate is 0."""
    mix_coef: float = 0.0
    """Weight of the likelihood of rows that are mixed in."""
    mix_seed: int = 0
    """Of the order of those rows, over all trainings of a run."""
    stop_above: tuple[str, float] | None = None
    """Metric and limit: training ends after the first step whose metric is above it."""
    save_every: int = 100
    """Steps between two resumable states, and ..."""
    save_minutes: float = 10.0
    """... minutes, whichever comes first."""
    state: str | None = None
    """Folder for resumable state."""
