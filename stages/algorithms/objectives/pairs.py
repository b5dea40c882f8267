"""Bradley-Terry on pairs of sequences, chosen first."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.reward_model import pairwise_loss


class BradleyTerry(Objective):
    """Reward model: the score is read at the last token of each sequence. Reads the row field margin where there is one."""

    network, select, unit = "scorer", "at", "row"

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        scores_B2 = outputs_SL[:, 0].view(-1, 2)
        margin_B = batch.row_fields.get("margin")
        return pairwise_loss(scores_B2[:, 0], scores_B2[:, 1], margin_B=margin_B, weight_B=batch.weight_B)
