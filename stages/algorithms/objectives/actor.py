"""The clipped policy loss of PPO on stored experience."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss, metric
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.ppo import policy_loss


class Actor(Objective):
    """Reads the token fields old_logprobs and advantages; log-probabilities at the sampling temperature."""

    entropy = True

    def __init__(self, *, temperature: float, clip_low: float, clip_high: float):
        self.temperature, self.clip_low, self.clip_high = temperature, clip_low, clip_high

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        loss = policy_loss(
            outputs_SL, batch.token_fields["old_logprobs"], batch.token_fields["advantages"], batch.mask_SL,
            clip_low=self.clip_low, clip_high=self.clip_high,
        )  # fmt: skip
        return Loss(loss.sum, loss.count, {**loss.metrics, "entropy": metric(entropy_SL, batch.mask_SL)}, loss.maxima)
