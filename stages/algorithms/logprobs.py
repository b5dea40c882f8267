"""Log-probabilities of tokens, and weights for those that another engine sampled (N tokens, V vocabulary)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from stages.algorithms.masked import check_mask, fill_masked


def token_logprobs(logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Log-probabilities, in nats, of the targets under softmax(logits / temperature).

    logits_NV: any float type, computed in float32 or better. targets_N: int64 ids in 0..V-1. temperature: the
    sampler's own. Returns logprobs_N. Raises ValueError when shapes differ or the temperature is not positive.
    """
    if logits_NV.shape[:-1] != targets_N.shape:
        raise ValueError(f"shapes differ: logits {tuple(logits_NV.shape)}, targets {tuple(targets_N.shape)}")
    scaled_NV = _scaled(logits_NV, temperature)
    return scaled_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1) - scaled_NV.logsumexp(dim=-1)


def entropy(logits_NV: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy, in nats, of softmax(logits / temperature). A logit of -inf adds 0, to the gradient too.

    Returns entropy_N. Raises ValueError when the temperature is not positive.
    """
    logprobs_NV = _scaled(logits_NV, temperature).log_softmax(dim=-1)
    return -(logprobs_NV.exp() * logprobs_NV.masked_fill(logprobs_NV == -torch.inf, 0.0)).sum(dim=-1)


def top_p_logprobs(logits_NV: Tensor, *, top_p: float, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities renormalised over the smallest set of likeliest tokens that holds at least top_p of the mass.

    Returns (logprobs_NV: -inf outside the set, offset_N = -ln(mass of the set)). Renormalised = full + offset: take
    the offset off before comparing with full log-probabilities. Ties go to the lower id.
    Raises ValueError unless 0 < top_p <= 1 and temperature > 0. Holtzman et al. 2020, section 3.1.
    """
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must lie in (0, 1], not {top_p}")
    full_NV = _scaled(logits_NV, temperature).log_softmax(dim=-1)
    probabilities_NV, order_NV = full_NV.exp().sort(dim=-1, descending=True, stable=True)
    kept_sorted_NV = probabilities_NV.cumsum(dim=-1) - probabilities_NV < top_p
    kept_NV = torch.zeros_like(kept_sorted_NV).scatter(-1, order_NV, kept_sorted_NV)
    renormalised_NV = full_NV.masked_fill(~kept_NV, -torch.inf)
    offset_N = -renormalised_NV.logsumexp(dim=-1)
    return renormalised_NV + offset_N.unsqueeze(-1), offset_N


def truncated_importance(
    log_ratio_BL: Tensor, mask_BL: Tensor, *, low: float, high: float, kind: Literal["tis", "icepop", "sequence"]
) -> Tensor:
    """Weights w = exp(log_ratio) that correct for tokens sampled by an engine whose log-probabilities differ a little.

    log_ratio_BL: trainer's minus engine's log-probability of each sampled token, in nats; masked slots may hold
    anything. mask_BL: bool. tis: w limited to [low, high]. icepop: w, but 0 outside of it. sequence: w where the
    geometric mean of w over the row's tokens lies within, else 0.
    Returns weights_BL, detached, 0 where masked. Raises ValueError when shapes differ, the kind is unknown or the
    range is not 0 <= low < high.
    Yao et al. 2025 (TIS); Ling team 2025 (IcePop).
    """
    check_mask(mask_BL, log_ratio_BL)
    if not 0.0 <= low < high:
        raise ValueError(f"the range must be 0 <= low < high, not {low}, {high}")
    log_ratio_BL = fill_masked(log_ratio_BL.detach(), mask_BL)
    weights_BL = log_ratio_BL.exp()
    if kind == "tis":
        weights_BL = weights_BL.clamp(low, high)
    elif kind == "icepop":
        weights_BL = torch.where((weights_BL >= low) & (weights_BL <= high), weights_BL, 0.0)
    elif kind == "sequence":
        mean_B = (log_ratio_BL.sum(dim=1) / mask_BL.sum(dim=1).clamp(min=1)).exp()
        weights_BL = torch.where(((mean_B >= low) & (mean_B <= high))[:, None], weights_BL, 0.0)
    else:
        raise ValueError(f"unknown importance weights {kind!r}: tis, icepop or sequence")
    return weights_BL.masked_fill(~mask_BL, 0.0)


def _scaled(logits_NV: Tensor, temperature: float) -> Tensor:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return logits_NV if temperature == 1.0 else logits_NV / temperature
