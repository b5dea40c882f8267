"""The form of an objective, and of what it is given (B rows, S sequences, L chosen tokens of the longest)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from stages.algorithms.loss import Loss


@dataclass(frozen=True)
class MicroBatch:
    """The chosen tokens of some sequences, padded; a filler has an all-False mask and zero weights."""

    mask_SL: Tensor
    weight_B: Tensor
    length_S: Tensor
    """Chosen tokens of each sequence, of fillers too."""
    token_fields: dict[str, Tensor] = field(default_factory=dict)
    """name -> [S, L]."""
    row_fields: dict[str, Tensor] = field(default_factory=dict)
    """name -> [B]."""


class Objective:
    """One loss on one kind of network. Options are the constructor's keyword arguments."""

    network: ClassVar[Literal["causal", "scorer"]] = "causal"
    """Causal: outputs are log-probabilities of the chosen tokens. Scorer: a value for each."""
    select: ClassVar[Literal["before", "at"]] = "before"
    """Whether an output is read at the token before a chosen one (which predicts it) or at itself."""
    unit: ClassVar[Literal["token", "row"]] = "token"
    """What the loss of a step is divided by."""
    temperature: float = 1.0
    statistic_of_logits: str | None = None
    """`entropy`: the loss is given the entropy of each prediction too; `trained entropy`: with its gradient."""

    def statistic(self, outputs_SL: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """(sum, count) over the companion rows of a whole step, taken without gradient before its losses."""
        raise TypeError(f"{type(self).__name__} takes no statistic; give it no companion rows")

    def use_statistic(self, total: float, count: float) -> None:
        """What `statistic` came to over all micro-batches and ranks of the step."""

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        raise TypeError(f"{type(self).__name__} has no loss")
