"""Rewards per response token: the score on the last one, a KL penalty on each (B rows, L positions)."""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.kl import KLKind, kl_estimate
from stages.algorithms.masked import check_mask, check_shapes, fill_masked


def last_response_index(mask_BL: Tensor) -> Tensor:
    """Position of the last True slot of each row, int64; -1 where there is none. mask_BL: bool, else ValueError."""
    check_mask(mask_BL)
    position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    return torch.where(mask_BL, position_L, -1).amax(dim=1)


def shaped_rewards(
    scores_B: Tensor,
    logprobs_BL: Tensor,
    reference_logprobs_BL: Tensor,
    mask_BL: Tensor,
    *,
    kl_coef: float,
    kl_kind: KLKind = "k1",
    kl_clamp: float | None = None,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Token rewards -kl_coef * KL_t, plus the clipped score on the last response token.

    scores_B: one reward a row. logprobs_BL, reference_logprobs_BL: of the sampled tokens, at one temperature, in nats;
    masked slots may hold anything. mask_BL: bool, True on response tokens. kl_kind, kl_clamp: as in kl_estimate.
    clip: scores are limited to [-clip, clip]; not when None.
    Returns (rewards_BL: zero where masked, valid_B: bool, False where a row has no response token and so no reward).
    Raises ValueError when shapes differ, clip is not positive or a valid row's score is NaN.
    Ouyang et al. 2022, eq. 2, token by token.
    """
    check_mask(mask_BL, logprobs_BL, reference_logprobs_BL)
    check_shapes(scores_B, mask_BL[:, 0])
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, not {clip}")
    last_B = last_response_index(mask_BL)
    valid_B = last_B >= 0
    if bool((scores_B.isnan() & valid_B).any()):
        raise ValueError(f"NaN score in rows {(scores_B.isnan() & valid_B).nonzero().flatten().tolist()}")
    scores_B = fill_masked(scores_B, valid_B)
    if clip is not None:
        scores_B = scores_B.clamp(-clip, clip)
    logprobs_BL, reference_logprobs_BL = fill_masked(logprobs_BL, mask_BL), fill_masked(reference_logprobs_BL, mask_BL)
    rewards_BL = -kl_coef * kl_estimate(logprobs_BL, reference_logprobs_BL, kl_kind, kl_clamp)
    position_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
    rewards_BL = rewards_BL + torch.where(position_L == last_B[:, None], scores_B[:, None].to(rewards_BL.dtype), 0.0)
    return rewards_BL.masked_fill(~mask_BL, 0.0), valid_B


def overlong_penalty(length_B: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Penalty in [-1, 0] that grows linearly over the last `buffer` tokens before max_length, and stays -1 beyond it.

    length_B: response tokens. Returns float32. Raises ValueError unless 0 < buffer <= max_length.
    Yu et al. 2025 (DAPO), eq. 13.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must lie in 1..max_length={max_length}, not {buffer}")
    return ((max_length - buffer - length_B).float() / buffer).clamp(-1.0, 0.0)
