"""Reward model: pairwise loss, statistics of its scores and what is derived from them (B rows)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from stages.algorithms.loss import Loss, metric
from stages.algorithms.masked import Moments, check_shapes, fill_masked, masked_sum, row_weights


def pairwise_loss(chosen_B: Tensor, rejected_B: Tensor, *, margin_B: Tensor | None = None, weight_B: Tensor | None = None) -> Loss:
    """-log sigmoid(chosen - rejected - margin) of each pair, finite for any difference.

    chosen_B, rejected_B: scores. margin_B: by how much chosen should win, 0 when None. weight_B: float, 1 when None; a
    row of weight 0 is a filler and may hold anything.
    Returns a Loss counted in row weights, with metrics accuracy (a tie is half), chosen_score, rejected_score,
    score_margin. Raises ValueError when shapes differ. Ouyang et al. 2022, eq. 1; Touvron et al. 2023 (margin), eq. 2.
    """
    check_shapes(chosen_B, rejected_B)
    weight_B, kept_B = row_weights(weight_B, chosen_B)
    chosen_B, rejected_B = fill_masked(chosen_B, kept_B), fill_masked(rejected_B, kept_B)
    difference_B = chosen_B - rejected_B
    target_B = difference_B
    if margin_B is not None:
        check_shapes(chosen_B, margin_B)
        target_B = difference_B - fill_masked(margin_B, kept_B)
    metrics = {
        "accuracy": metric(accuracy(difference_B), weight_B),
        "chosen_score": metric(chosen_B, weight_B),
        "rejected_score": metric(rejected_B, weight_B),
        "score_margin": metric(difference_B, weight_B),
    }
    return Loss(*masked_sum(softplus(-target_B), weight_B), metrics)


def accuracy(difference_B: Tensor) -> Tensor:
    """1 where chosen beats rejected, 0 where it loses, a half where they tie, as a coin would do."""
    return 0.5 * (1.0 + torch.sign(difference_B.detach()))


def score_statistics(scores_B: Tensor, *, weight_B: Tensor | None = None) -> Moments:
    """Moments of one rank's scores, to be added over ranks; rows of weight 0 (fillers, repeats) do not count."""
    return Moments.of(scores_B, row_weights(weight_B, scores_B)[1])


def calibration_error(difference_B: Tensor, *, bins: int = 10) -> float:
    """Expected calibration error of held-out pairs: how far the predicted probability that the favoured response wins,
    sigmoid(|difference|), is from how often it does, averaged over equally filled bins of pairs.

    difference_B: chosen minus rejected score. Returns a number in [0, 0.5]; 0 for no pairs. Guo et al. 2017, eq. 3.
    """
    order_B = difference_B.abs().argsort(stable=True)
    predicted_B, right_B = difference_B.double().abs().sigmoid()[order_B], accuracy(difference_B.double())[order_B]
    parts = [(p, r) for p, r in zip(predicted_B.tensor_split(bins), right_B.tensor_split(bins)) if len(p)]
    return sum(float((p.mean() - r.mean()).abs()) * len(p) for p, r in parts) / max(1, len(difference_B))


def zscore(scores_B: Tensor, moments: Moments, *, ddof: int = 1) -> Tensor:
    """(scores - mean) / std with the statistics of another set, zeros when that set is constant.

    Raises ValueError when moments hold ddof numbers or fewer: normalised rewards need statistics.
    """
    std = moments.std(ddof)
    centred_B = scores_B.double() - moments.mean
    return (centred_B / std if std > 0 else torch.zeros_like(centred_B)).to(scores_B.dtype)


def format_score(score: float, *, digits: int = 2) -> str:
    """Score as text for a prompt, rounded; never "-0.00", which a model would read as a token of its own."""
    text = f"{score:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0.0 else text
