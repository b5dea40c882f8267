"""The clipped policy loss of PPO on stored experience, with its optional terms."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.kl import kl_estimate
from stages.algorithms.loss import Loss, metric
from stages.algorithms.masked import fill_masked, masked_sum
from stages.algorithms.objectives.base import MicroBatch, Objective
from stages.algorithms.ppo import policy_loss


class Actor(Objective):
    """Reads the token fields old_logprobs and advantages, importance where there is one, and reference_logprobs for the
    KL term; log-probabilities at the sampling temperature.

    loss = clipped surrogate + kl_loss_coef * KL(policy || reference) - entropy_coef * entropy, per response token.
    """

    def __init__(self, *, temperature: float, clip_low: float, clip_high: float, dual_clip: float | None = None,
                 kl_loss_coef: float = 0.0, kl_loss_estimator: str = "k3", entropy_coef: float = 0.0):  # fmt: skip
        self.temperature = temperature
        self.clip = {"clip_low": clip_low, "clip_high": clip_high, "dual_clip": dual_clip}
        self.kl_loss_coef, self.kl_loss_estimator, self.entropy_coef = kl_loss_coef, kl_loss_estimator, entropy_coef
        self.statistic_of_logits = "entropy" if entropy_coef == 0.0 else "trained entropy"

    def loss(self, outputs_SL: Tensor, entropy_SL: Tensor | None, batch: MicroBatch) -> Loss:
        fields, mask_SL = batch.token_fields, batch.mask_SL
        loss = policy_loss(
            outputs_SL, fields["old_logprobs"], fields["advantages"], mask_SL, **self.clip, importance_BL=fields.get("importance")
        )
        total, metrics = loss.sum, {**loss.metrics, "entropy": metric(entropy_SL, mask_SL)}
        if self.kl_loss_coef:
            kl_SL = kl_estimate(
                fill_masked(outputs_SL, mask_SL), fill_masked(fields["reference_logprobs"], mask_SL), self.kl_loss_estimator
            )
            total = total + self.kl_loss_coef * masked_sum(kl_SL, mask_SL)[0]
            metrics["kl_loss"] = metric(kl_SL, mask_SL)
        if self.entropy_coef:
            total = total - self.entropy_coef * masked_sum(entropy_SL, mask_SL)[0]
        return Loss(total, loss.count, metrics, loss.maxima)
