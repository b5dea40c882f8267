"""Direct preference losses on pairs of sequences, chosen first."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.preference import preference_loss


class Preference(Objective):
    """Reads the row fields reference_chosen and reference_rejected: log-probabilities of whole responses."""

    unit = "row"

    def __init__(self, *, loss: str, beta: float, label_smoothing: float, robust: bool, average_logprobs: bool):
        self.options = {"kind": loss, "beta": beta, "label_smoothing": label_smoothing, "robust": robust}
        self.average = average_logprobs

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        sums_B2 = outputs_SL.sum(dim=1).view(-1, 2)
        lengths_B2 = batch.length_S.view(-1, 2).to(sums_B2.dtype)
        lengths = {"chosen_length_B": lengths_B2[:, 0], "rejected_length_B": lengths_B2[:, 1]} if self.average else {}
        fields = batch.row_fields
        return preference_loss(
            sums_B2[:, 0], sums_B2[:, 1], fields["reference_chosen"], fields["reference_rejected"], weight_B=batch.weight_B,
            **self.options, **lengths,
        )  # fmt: skip
