"""Advantages against the other samples of a prompt (G prompts, N samples of each)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stages.algorithms.masked import check_mask, fill_masked

BaselineKind = Literal["mean", "rloo", "grpo", "grpo_population", "dr_grpo"]


def group_advantages(rewards_GN: Tensor, *, kind: BaselineKind, valid_GN: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    """Rewards less a baseline from their own group; zeros for a group without signal.

    rewards_GN: one scalar reward a sample. valid_GN: bool, False for a sample without response tokens, which neither
    gets an advantage nor moves the baseline; all True when None.
    mean, dr_grpo: r - mean. rloo: r - mean of the others. grpo: (r - mean) / (std + eps) with ddof 1; grpo_population:
    with ddof 0.
    Returns advantages_GN in the type of the rewards, 0 where invalid or where fewer than two samples are valid.
    Raises ValueError when N < 2 (nothing to compare with), shapes differ, the kind is unknown or a valid reward is
    NaN. Ahmadian et al. 2024 (RLOO); Shao et al. 2024 (GRPO), section 4.1; Liu et al. 2025 (Dr. GRPO).
    """
    if rewards_GN.ndim != 2 or rewards_GN.shape[1] < 2:
        raise ValueError(f"a group needs two samples or more; rewards have shape {tuple(rewards_GN.shape)}")
    valid_GN = _valid(rewards_GN, valid_GN)
    signal_G1 = has_signal(rewards_GN, valid_GN=valid_GN)[:, None]
    filled_GN = fill_masked(rewards_GN, valid_GN).double()
    count_G1 = valid_GN.sum(dim=1, keepdim=True)
    centred_GN = (filled_GN - filled_GN.sum(dim=1, keepdim=True) / count_G1.clamp(min=1)).masked_fill(~valid_GN, 0.0)
    square_G1 = centred_GN.square().sum(dim=1, keepdim=True)
    if kind in ("mean", "dr_grpo"):
        advantages_GN = centred_GN
    elif kind == "rloo":
        advantages_GN = centred_GN * count_G1 / (count_G1 - 1).clamp(min=1)
    elif kind == "grpo":
        advantages_GN = centred_GN / ((square_G1 / (count_G1 - 1).clamp(min=1)).sqrt() + eps)
    elif kind == "grpo_population":
        advantages_GN = centred_GN / ((square_G1 / count_G1.clamp(min=1)).sqrt() + eps)
    else:
        raise ValueError(f"unknown baseline {kind!r}: mean, rloo, grpo, grpo_population or dr_grpo")
    return advantages_GN.masked_fill(~signal_G1, 0.0).to(rewards_GN.dtype)


def has_signal(rewards_GN: Tensor, *, valid_GN: Tensor | None = None) -> Tensor:
    """signal_G, bool: True where two valid samples differ in reward. Raises ValueError when a valid reward is NaN."""
    valid_GN = _valid(rewards_GN, valid_GN)
    failed_G = (rewards_GN.isnan() & valid_GN).any(dim=1)
    if bool(failed_G.any()):
        raise ValueError(f"NaN reward in groups {failed_G.nonzero().flatten().tolist()}")
    high_G = fill_masked(rewards_GN, valid_GN, -torch.inf).amax(dim=1)
    low_G = fill_masked(rewards_GN, valid_GN, torch.inf).amin(dim=1)
    return high_G > low_G


def group_filter(rewards_GN: Tensor, *, low: float, high: float, valid_GN: Tensor | None = None) -> Tensor:
    """kept_G, bool: groups worth training on, low < mean < high and not all rewards equal.

    Raises ValueError when low >= high, shapes differ or a valid reward is NaN. Yu et al. 2025 (DAPO), eq. 11.
    """
    if not low < high:
        raise ValueError(f"the range must be low < high, not {low}, {high}")
    valid_GN = _valid(rewards_GN, valid_GN)
    mean_G = fill_masked(rewards_GN, valid_GN).double().sum(dim=1) / valid_GN.sum(dim=1).clamp(min=1)
    return (mean_G > low) & (mean_G < high) & has_signal(rewards_GN, valid_GN=valid_GN)


def _valid(rewards_GN: Tensor, valid_GN: Tensor | None) -> Tensor:
    if valid_GN is None:
        return torch.ones_like(rewards_GN, dtype=torch.bool)
    check_mask(valid_GN, rewards_GN)
    return valid_GN
