"""Losses of proximal policy optimisation: policy, value and sequence ratio (B rows, L positions)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stages.algorithms.kl import kl_estimate
from stages.algorithms.loss import Loss, metric
from stages.algorithms.masked import check_mask, fill_masked, masked_max, masked_sum

_LARGEST_LOG_RATIO = 20.0
"""Log ratios are limited to +-20 (a ratio of 4.9e8): exp stays finite, and so does the gradient behind a clip."""


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), elementwise over tokens, or over sequences for GSPO.

    dual_clip: where A < 0 the loss is limited to dual_clip * |A|; not when None.
    Returns (loss, clipped: bool, dual_clipped: bool); the flags mark slots whose gradient the clip took away.
    Raises ValueError unless 0 <= clip_low <= 1, 0 <= clip_high and 1 < dual_clip.
    Schulman et al. 2017, eq. 7; Yu et al. 2025 (clip_high), eq. 10; Ye et al. 2020 (dual clip).
    """
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise ValueError(f"clip_low must lie in [0, 1] and clip_high must not be negative, not {clip_low}, {clip_high}")
    if dual_clip is not None and not dual_clip > 1.0:
        raise ValueError(f"dual_clip must be above 1, not {dual_clip}")
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual_clip is None:
        return loss, clipped, torch.zeros_like(clipped)
    ceiling = -dual_clip * advantages
    dual_clipped = (advantages < 0) & (loss > ceiling)
    return torch.where(dual_clipped, ceiling, loss), clipped, dual_clipped


def policy_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages_BL: Tensor,
    mask_BL: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    importance_BL: Tensor | None = None,
) -> Loss:
    """Clipped policy loss over the response tokens; the ratio is 1 and its gradient -A while the policy is the old one.

    logprobs_BL: of the sampled tokens under the policy being trained. old_logprobs_BL: under the old one, constants.
    advantages_BL: constants. importance_BL: constant weights of the token losses (truncated_importance); 1 when None.
    mask_BL: bool; masked slots of all tensors may hold anything; an all-False row is a filler.
    Returns a Loss counted in tokens, with metrics clip_fraction, dual_clip_fraction, approximate_kl_k1 and _k3 of
    KL(old || new) in nats, and maximum ratio_max (0 when all is masked).
    Raises ValueError when shapes differ or as clipped_surrogate does. Schulman et al. 2017, eq. 7.
    """
    check_mask(mask_BL, logprobs_BL, old_logprobs_BL, advantages_BL)
    logprobs_BL, old_logprobs_BL = fill_masked(logprobs_BL, mask_BL), fill_masked(old_logprobs_BL.detach(), mask_BL)
    ratio_BL = _ratio(logprobs_BL - old_logprobs_BL)
    loss_BL, clipped_BL, dual_clipped_BL = clipped_surrogate(
        ratio_BL,
        fill_masked(advantages_BL.detach(), mask_BL),
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )
    if importance_BL is not None:
        check_mask(mask_BL, importance_BL)
        loss_BL = loss_BL * fill_masked(importance_BL.detach(), mask_BL)
    metrics = {
        "clip_fraction": metric(clipped_BL, mask_BL),
        "dual_clip_fraction": metric(dual_clipped_BL, mask_BL),
        "approximate_kl_k1": metric(kl_estimate(old_logprobs_BL, logprobs_BL, "k1"), mask_BL),
        "approximate_kl_k3": metric(kl_estimate(old_logprobs_BL, logprobs_BL, "k3"), mask_BL),
    }
    return Loss(*masked_sum(loss_BL, mask_BL), metrics, {"ratio_max": masked_max(ratio_BL, mask_BL, empty=0.0)})


def sequence_ratio(logprobs_BL: Tensor, old_logprobs_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Geometric mean of the token ratios of each row: goes into clipped_surrogate in place of the token ratio.

    Masked slots may hold anything. mask_BL: bool. Returns ratio_B, differentiable; 1 for a row without response
    tokens. Raises ValueError when shapes differ. Zheng et al. 2025 (GSPO), eq. 7.
    """
    check_mask(mask_BL, logprobs_BL, old_logprobs_BL)
    log_ratio_BL = fill_masked(logprobs_BL, mask_BL) - fill_masked(old_logprobs_BL.detach(), mask_BL)
    return _ratio(log_ratio_BL.sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1))


def value_loss(values_BL: Tensor, old_values_BL: Tensor, returns_BL: Tensor, mask_BL: Tensor, *, clip: float | None) -> Loss:
    """max((v - R)^2, (v_clipped - R)^2) / 2 over response tokens; v_clipped is v, at most clip from old_values.

    old_values_BL, returns_BL: constants, in units of reward like values_BL and clip; no clip when None.
    mask_BL: bool; masked slots may hold anything; an all-False row is a filler.
    Returns a Loss counted in tokens, with metrics value, value_clip_fraction and those that explained_variance reads.
    Raises ValueError when shapes differ or clip is not positive.
    Schulman et al. 2017, eq. 9, clipped as in OpenAI baselines.
    """
    check_mask(mask_BL, values_BL, old_values_BL, returns_BL)
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, not {clip}")
    values_BL = fill_masked(values_BL, mask_BL)
    old_BL, returns_BL = fill_masked(old_values_BL.detach(), mask_BL), fill_masked(returns_BL.detach(), mask_BL)
    plain_BL = bounded_BL = 0.5 * (values_BL - returns_BL).square()
    if clip is not None:
        bounded_BL = 0.5 * (old_BL + (values_BL - old_BL).clamp(-clip, clip) - returns_BL).square()
    moved_BL = (values_BL - old_BL).abs() > (clip if clip is not None else torch.inf)  # beyond rounding
    residual_BL = returns_BL.double() - values_BL.detach().double()
    metrics = {
        "value": metric(values_BL, mask_BL),
        "value_clip_fraction": metric((bounded_BL > plain_BL) & moved_BL, mask_BL),
        "return": metric(returns_BL, mask_BL),
        "return_squared": metric(returns_BL.double().square(), mask_BL),
        "residual": metric(residual_BL, mask_BL),
        "residual_squared": metric(residual_BL.square(), mask_BL),
    }
    return Loss(*masked_sum(torch.maximum(plain_BL, bounded_BL), mask_BL), metrics)


def explained_variance(means: Mapping[str, float]) -> float:
    """1 - Var(R - v) / Var(R) from the divided metrics of value_loss over a step; NaN for constant returns."""
    returns = means["return_squared"] - means["return"] ** 2
    residuals = means["residual_squared"] - means["residual"] ** 2
    return 1.0 - residuals / returns if returns > 0 else float("nan")


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
