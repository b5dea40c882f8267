"""Sums, means and moments over the unmasked slots only (B rows, L positions)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def length_mask(length_B: Tensor, *, width: int, start_B: Tensor | None = None) -> Tensor:
    """Mask that is True on positions start <= l < start + length of each row.

    length_B, start_B: integer counts of tokens, start 0 when None. Token ids play no part, so pad may equal eos.
    Returns mask_BL, bool, with L = width. Raises ValueError when a row would reach beyond width.
    """
    start_B = torch.zeros_like(length_B) if start_B is None else start_B
    if bool(((length_B < 0) | (start_B < 0) | (start_B + length_B > width)).any()):
        raise ValueError(f"rows must lie within 0..{width}: start {start_B.tolist()}, length {length_B.tolist()}")
    position_L = torch.arange(width, device=length_B.device)
    return (position_L >= start_B[:, None]) & (position_L < (start_B + length_B)[:, None])


def check_mask(mask: Tensor, *tensors: Tensor) -> None:
    """Raises ValueError unless mask is bool and every tensor has its shape."""
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask must be bool, not {mask.dtype}")
    check_shapes(mask, *tensors)


def check_shapes(first: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all tensors have one shape: broadcasting would silently pair the wrong slots."""
    if any(other.shape != first.shape for other in others):
        raise ValueError(f"shapes differ: {[tuple(tensor.shape) for tensor in (first, *others)]}")


def fill_masked(x: Tensor, mask: Tensor, value: float = 0.0) -> Tensor:
    """x with its masked slots set to a harmless value, in float32 or better.

    Done before any arithmetic, this keeps a NaN of a masked slot out of values and gradients alike: the gradient of a
    filled slot is exactly zero, where x * mask would give NaN * 0 = NaN.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~mask, value)


def row_weights(weight_B: Tensor | None, like_B: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of the rows, 1 when None, and kept_B, False on the zero-weight fillers.

    weight_B: float, shape of like_B. Returns (weight_B, kept_B: bool). Raises ValueError when shapes differ.
    """
    if weight_B is None:
        weight_B = torch.ones_like(like_B, requires_grad=False)
    check_shapes(like_B, weight_B)
    return weight_B, weight_B != 0


def masked_sum(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over the unmasked slots, and what it has to be divided by.

    x: any shape; masked slots may hold anything, NaN too. mask: of the same shape, bool, or float weights whose zeros
    are masked. Returns scalars (sum: differentiable; count: float64, number of True slots or sum of weights), which
    are (0, 0) when all is masked. Raises ValueError when shapes differ.
    """
    check_shapes(x, mask)
    filled = fill_masked(x, mask != 0)
    if mask.dtype != torch.bool:
        filled = filled * mask.to(filled.dtype)
    return filled.sum(), mask.sum(dtype=torch.float64)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the unmasked slots, or the weighted mean; 0 when all is masked. Arguments and errors of masked_sum."""
    total, count = masked_sum(x, mask)
    return total / torch.where(count > 0, count, 1.0).to(total.dtype)


def masked_max(x: Tensor, mask: Tensor, *, empty: float) -> Tensor:
    """Largest unmasked value, detached; `empty` when all is masked. Raises ValueError when shapes differ."""
    check_mask(mask, x)
    filled = fill_masked(x.detach(), mask, empty).flatten()
    return torch.cat([filled, filled.new_full((1,), empty)]).max()


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers, in float64; `+` joins the sets of two ranks."""

    count: float = 0.0
    """Numbers seen."""
    mean: float = 0.0
    """Their mean; 0 when there are none."""
    m2: float = 0.0
    """Sum of (x - mean)^2; exactly 0 for a constant, however large."""

    @classmethod
    def of(cls, x: Tensor, mask: Tensor) -> Moments:
        """Moments of the unmasked slots. x: any shape, masked slots may hold anything; mask: bool, of that shape."""
        check_mask(mask, x)
        kept_N = x.detach()[mask].double()
        if kept_N.numel() == 0:
            return cls()
        pivot = kept_N[0]
        mean = pivot + (kept_N - pivot).mean()
        return cls(float(kept_N.numel()), mean.item(), (kept_N - mean).square().sum().item())

    def __add__(self, other: Moments) -> Moments:
        """Moments of the union of two disjoint sets. Chan, Golub and LeVeque 1979."""
        count = self.count + other.count
        if count == 0:
            return Moments()
        if self.count == 0:
            return other
        delta = other.mean - self.mean
        share = other.count / count
        return Moments(count, self.mean + delta * share, self.m2 + other.m2 + delta * delta * self.count * share)

    def variance(self, ddof: int = 0) -> float:
        """m2 / (count - ddof). Raises ValueError when there are too few numbers for it."""
        if self.count <= ddof:
            raise ValueError(f"a variance with ddof={ddof} needs more than {ddof} numbers, not {self.count:g}")
        return self.m2 / (self.count - ddof)

    def std(self, ddof: int = 0) -> float:
        """Square root of variance(ddof)."""
        return math.sqrt(self.variance(ddof))


def whiten(
    x_BL: Tensor,
    mask_BL: Tensor,
    *,
    moments: Moments | None = None,
    unbiased: bool = False,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Unmasked slots scaled to variance 1, and to mean 0 unless shift_mean is False; constant input gives zeros.

    x_BL: masked slots may hold anything. mask_BL: bool. moments: of all ranks together; those of x_BL when None.
    unbiased: divide by count - 1. eps: added to the variance.
    Returns a tensor of x_BL's shape, zero where masked. Raises ValueError when shapes differ or moments hold too few
    numbers for a variance.
    """
    check_mask(mask_BL, x_BL)
    filled_BL = fill_masked(x_BL, mask_BL)
    moments = Moments.of(x_BL, mask_BL) if moments is None else moments
    if moments.count == 0 and not bool(mask_BL.any()):
        return filled_BL
    scale = 1.0 / math.sqrt(moments.variance(ddof=int(unbiased)) + eps)
    offset = 0.0 if shift_mean else moments.mean
    white_BL = (filled_BL.double() - moments.mean) * scale + offset
    return white_BL.to(filled_BL.dtype).masked_fill(~mask_BL, 0.0)
