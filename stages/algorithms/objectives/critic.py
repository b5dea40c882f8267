"""The clipped value loss of PPO on stored experience."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.ppo import value_loss


class Critic(Objective):
    """Reads the token fields old_values and returns; the value of a token is read before it is chosen."""

    network = "scorer"

    def __init__(self, *, clip: float | None):
        self.clip = clip

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        fields = batch.token_fields
        return value_loss(outputs_SL, fields["old_values"], fields["returns"], batch.mask_SL, clip=self.clip)
