"""Direct preference losses: DPO, conservative and robust DPO, IPO (B rows, each a pair of responses)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import softplus

from stages.algorithms.loss import Loss, metric
from stages.algorithms.masked import check_shapes, fill_masked, masked_sum, row_weights
from stages.algorithms.reward_model import accuracy


def preference_loss(
    policy_chosen_B: Tensor,
    policy_rejected_B: Tensor,
    reference_chosen_B: Tensor,
    reference_rejected_B: Tensor,
    *,
    kind: Literal["sigmoid", "ipo"],
    beta: float,
    label_smoothing: float = 0.0,
    robust: bool = False,
    chosen_length_B: Tensor | None = None,
    rejected_length_B: Tensor | None = None,
    weight_B: Tensor | None = None,
) -> Loss:
    """Preference loss on h = (policy - reference)(chosen) - (policy - reference)(rejected).

    The first four: log-probabilities summed over the response, in nats; both lengths (response tokens) make them
    means. sigmoid: L(h) = -log sigmoid(beta h). label_smoothing e mixes in the flipped pair, (1 - e) L(h) + e L(-h)
    (cDPO), or, if robust, takes it away, ((1 - e) L(h) - e L(-h)) / (1 - 2e). ipo: (h - 1 / (2 beta))^2.
    weight_B: float, 1 when None; a row of weight 0 is a filler and may hold anything.
    Returns a Loss counted in row weights, with metrics chosen_reward, rejected_reward (beta times log ratio),
    reward_margin and accuracy (a tie is half). Raises ValueError when shapes differ, only one length is given, beta is
    not positive, e leaves [0, 0.5), or an option is given that the loss does not read.
    Rafailov et al. 2023 (DPO), eq. 7; Mitchell 2023 (cDPO); Chowdhury et al. 2024 (robust DPO); Azar et al. 2024
    (IPO), eq. 17.
    """
    check_shapes(policy_chosen_B, policy_rejected_B, reference_chosen_B, reference_rejected_B)
    _check_options(kind, beta, label_smoothing, robust)
    weight_B, kept_B = row_weights(weight_B, policy_chosen_B)
    chosen_B = fill_masked(policy_chosen_B, kept_B) - fill_masked(reference_chosen_B, kept_B)
    rejected_B = fill_masked(policy_rejected_B, kept_B) - fill_masked(reference_rejected_B, kept_B)
    if (chosen_length_B is None) != (rejected_length_B is None):
        raise ValueError("give the lengths of both responses or of neither")
    if chosen_length_B is not None and rejected_length_B is not None:
        check_shapes(policy_chosen_B, chosen_length_B, rejected_length_B)
        chosen_B = chosen_B / fill_masked(chosen_length_B, kept_B, 1.0)
        rejected_B = rejected_B / fill_masked(rejected_length_B, kept_B, 1.0)
    h_B = chosen_B - rejected_B
    if kind == "ipo":
        loss_B = (h_B - 1.0 / (2.0 * beta)).square()
    else:
        loss_B, flipped_B = softplus(-beta * h_B), softplus(beta * h_B)
        if robust:
            loss_B = ((1.0 - label_smoothing) * loss_B - label_smoothing * flipped_B) / (1.0 - 2.0 * label_smoothing)
        else:
            loss_B = (1.0 - label_smoothing) * loss_B + label_smoothing * flipped_B
    metrics = {
        "chosen_reward": metric(beta * chosen_B, weight_B),
        "rejected_reward": metric(beta * rejected_B, weight_B),
        "reward_margin": metric(beta * h_B, weight_B),
        "accuracy": metric(accuracy(h_B), weight_B),
    }
    return Loss(*masked_sum(loss_B, weight_B), metrics)


def _check_options(kind: str, beta: float, label_smoothing: float, robust: bool) -> None:
    if kind not in ("sigmoid", "ipo"):
        raise ValueError(f"unknown preference loss {kind!r}: sigmoid or ipo")
    if not beta > 0:
        raise ValueError(f"beta must be positive, not {beta}")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0, 0.5), not {label_smoothing}")
    if kind == "ipo" and (label_smoothing or robust):
        raise ValueError("ipo reads neither label_smoothing nor robust")
    if robust and not label_smoothing:
        raise ValueError("robust needs a label_smoothing above 0")
