"""Kahneman-Tversky optimisation: a loss on single rated responses (B rows)."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.loss import Loss, metric
from stages.algorithms.masked import check_mask, check_shapes, fill_masked, masked_sum, row_weights


def kto_kl(sum_: Tensor | float, count: Tensor | float) -> Tensor:
    """Reference point z = max(0, mean log ratio of the mismatched pairs), detached, in nats.

    sum_, count: of policy minus reference log-probability over the mismatched pairs of all ranks: a mean of the ranks'
    means is another number. Raises ValueError when count is 0. Ethayarajh et al. 2024, below eq. 8.
    """
    if not float(count) > 0:
        raise ValueError("the KL estimate of KTO needs at least one mismatched pair")
    return torch.as_tensor(sum_ / count).detach().clamp(min=0.0)


def kto_loss(
    policy_B: Tensor,
    reference_B: Tensor,
    labels_B: Tensor,
    z: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    weight_B: Tensor | None = None,
) -> Loss:
    """lambda (1 - sigmoid(beta (h - z))) for a desirable response, h and z swapped for an undesirable one.

    policy_B, reference_B: log-probabilities summed over the response, in nats; h is their difference.
    labels_B: bool, True for desirable. z: from kto_kl, over the whole step. lambda: desirable_ or undesirable_weight.
    weight_B: float, 1 when None; a row of weight 0 is a filler and may hold anything.
    Returns a Loss counted in row weights (lambda is not counted), with metrics desirable_reward and
    undesirable_reward, both beta h. Raises ValueError when shapes differ, labels are not bool, beta is not positive
    or a lambda is negative. Ethayarajh et al. 2024, eq. 8.
    """
    check_shapes(policy_B, reference_B)
    check_mask(labels_B, policy_B)
    if not beta > 0:
        raise ValueError(f"beta must be positive, not {beta}")
    if desirable_weight < 0 or undesirable_weight < 0:
        raise ValueError(f"weights must not be negative, not {desirable_weight}, {undesirable_weight}")
    weight_B, kept_B = row_weights(weight_B, policy_B)
    h_B = fill_masked(policy_B, kept_B) - fill_masked(reference_B, kept_B)
    gain_B = torch.where(labels_B, h_B - z, z - h_B)
    lambda_B = torch.where(labels_B, desirable_weight, undesirable_weight).to(h_B.dtype)
    loss_B = lambda_B * torch.sigmoid(-beta * gain_B)
    metrics = {
        "desirable_reward": metric(beta * h_B, weight_B * labels_B),
        "undesirable_reward": metric(beta * h_B, weight_B * ~labels_B),
    }
    return Loss(*masked_sum(loss_B, weight_B), metrics)
