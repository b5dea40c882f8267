"""Advantages and returns over response tokens (B rows, L positions)."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.masked import check_mask, fill_masked


def gae(rewards_BL: Tensor, values_BL: Tensor, mask_BL: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and returns over the response tokens.

    rewards_BL, values_BL: float32; masked slots may hold anything, NaN too. mask_BL: bool, True on response tokens.
    Steps run over True slots only: a gap (tool output, padding) does not decay anything. After the last the value is
    0. Returns (advantages_BL, returns_BL), zero where masked. Raises ValueError when shapes differ or gamma, lam leave
    [0, 1].
    Schulman et al. 2016, eq. 16.
    """
    check_mask(mask_BL, rewards_BL, values_BL)
    _check_discounts(gamma=gamma, lam=lam)
    rewards_BL, values_BL = fill_masked(rewards_BL, mask_BL), fill_masked(values_BL, mask_BL)
    advantages_BL = torch.zeros_like(rewards_BL)
    next_value_B = next_advantage_B = rewards_BL.new_zeros(rewards_BL.shape[0])
    for t in reversed(range(rewards_BL.shape[1])):
        mask_B = mask_BL[:, t]
        delta_B = rewards_BL[:, t] + gamma * next_value_B - values_BL[:, t]
        next_advantage_B = torch.where(mask_B, delta_B + gamma * lam * next_advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_B, values_BL[:, t], next_value_B)
        advantages_BL[:, t] = next_advantage_B
    advantages_BL = advantages_BL.masked_fill(~mask_BL, 0.0)
    return advantages_BL, advantages_BL + values_BL


def discounted_returns(rewards_BL: Tensor, mask_BL: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each response token to the last: gae with values 0 and lam 1.

    rewards_BL: masked slots may hold anything. mask_BL: bool; gaps do not decay anything.
    Returns returns_BL, zero where masked. Raises ValueError when shapes differ or gamma leaves [0, 1].
    Williams 1992, REINFORCE.
    """
    return gae(rewards_BL, torch.zeros_like(rewards_BL), mask_BL, gamma=gamma, lam=1.0)[1]


def _check_discounts(**discounts: float) -> None:
    for name, value in discounts.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie in [0, 1], not {value}")
