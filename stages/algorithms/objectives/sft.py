"""Next-token likelihood of the chosen tokens."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.sft import token_nll_loss


class Likelihood(Objective):
    """Pretraining (all tokens chosen) and supervised fine-tuning (response tokens chosen)."""

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        return token_nll_loss(outputs_SL, batch.mask_SL)
