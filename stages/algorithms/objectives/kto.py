"""Kahneman-Tversky loss on single rated sequences."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.kto import kto_kl, kto_loss
from stages.algorithms.loss import Loss
from stages.algorithms.objectives.base import MicroBatch, Objective


class KTO(Objective):
    """Reads the row fields reference and label. `statistic` is taken over the step's companion rows, mismatched pairs."""

    unit = "row"

    def __init__(self, *, beta: float, desirable_weight: float, undesirable_weight: float):
        self.options = {"beta": beta, "desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        self.z = 0.0

    def statistic(self, outputs_SL: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Sum and count of policy minus reference over mismatched pairs."""
        difference_B = (outputs_SL.sum(dim=1) - batch.row_fields["reference"]) * batch.weight_B
        return difference_B.double().sum(), batch.weight_B.double().sum()

    def use_statistic(self, total: float, count: float) -> None:
        self.z = kto_kl(total, count)

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        fields = batch.row_fields
        loss = kto_loss(outputs_SL.sum(dim=1), fields["reference"], fields["label"] > 0.5, self.z, weight_B=batch.weight_B, **self.options)
        z = self.z.double().cpu()
        return Loss(
            loss.sum,
            loss.count,
            {**loss.metrics, "kl_reference_point": (z * batch.weight_B.double().sum().cpu(), batch.weight_B.double().sum().cpu())},
            loss.maxima,
        )
