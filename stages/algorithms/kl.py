"""Estimates of the divergence from the reference policy, and the controller of their coefficient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stages.algorithms.masked import check_shapes

KLKind = Literal["k1", "k2", "k3"]

_LARGEST_EXPONENT = 80.0
"""exp of it is finite in float32 and far above any clamp, so the gradient behind a clamp is 0 rather than inf * 0."""


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: KLKind, clamp: float | None = None) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats, for tokens that the policy sampled.

    logprobs, reference_logprobs: same shape, any. With d = logprobs - reference_logprobs: k1 = d; k2 = d^2 / 2;
    k3 = exp(-d) - 1 + d. clamp: the estimate itself is limited to [-clamp, clamp]; not when None.
    Returns a tensor of that shape; elementwise, so masking is the caller's. Raises ValueError when shapes differ, the
    kind is unknown or the clamp is not positive. Schulman 2020, "Approximating KL divergence".
    """
    check_shapes(logprobs, reference_logprobs)
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp must be positive, not {clamp}")
    d = logprobs - reference_logprobs
    if kind == "k1":
        estimate = d
    elif kind == "k2":
        estimate = 0.5 * d.square()
    elif kind == "k3":
        exponent = -d if clamp is None else (-d).clamp(max=_LARGEST_EXPONENT)
        estimate = torch.expm1(exponent) + d
    else:
        raise ValueError(f"unknown KL estimate {kind!r}: k1, k2 or k3")
    return estimate if clamp is None else estimate.clamp(-clamp, clamp)


@dataclass(frozen=True)
class AdaptiveKL:
    """Controller that moves the KL coefficient towards a target divergence; its fields are its whole state."""

    coefficient: float
    """Present coefficient of the KL penalty."""
    target: float
    """Wanted KL per sample, in nats."""
    horizon: float
    """Samples over which the coefficient may change by about a fifth."""

    def __post_init__(self) -> None:
        for name in ("target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"adaptive KL: {name} must be positive, not {getattr(self, name)}")
        if not self.coefficient >= 0:
            raise ValueError(f"adaptive KL: coefficient must not be negative, not {self.coefficient}")

    def updated(self, kl: float, n: int) -> AdaptiveKL:
        """Controller after n samples whose mean divergence was kl. Ziegler et al. 2019, section 2.2."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coefficient=self.coefficient * (1.0 + error * n / self.horizon))
