"""Pairwise reward loss and score statistics."""

import pytest
import torch

from stages.algorithms.loss import divide_metrics
from stages.algorithms.masked import Moments
from stages.algorithms.reward_model import format_score, pairwise_loss, score_statistics, zscore

NAN = float("nan")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(("margin", "total"), [(None, 0.474077 + 1.103186), (f64(0.5, 0), 2 * 0.898167)])
def test_pairwise_loss(margin, total):
    got = pairwise_loss(f64(1.2, -0.3), f64(0.7, 0.4), margin_B=margin)
    assert got.sum.item() == pytest.approx(total, abs=2e-6)
    assert got.mean().item() == pytest.approx(total / 2, abs=1e-6)


def test_a_difference_of_minus_200_costs_200_with_a_gradient_of_one():
    chosen = torch.tensor([-200.0], requires_grad=True)
    got = pairwise_loss(chosen, torch.tensor([0.0]))
    got.sum.backward()
    assert got.sum.item() == 200.0 and chosen.grad.item() == -1.0


@pytest.mark.parametrize("batches", [[3], [2, 1], [1, 1, 1]])
def test_evaluation_does_not_depend_on_the_batch_size(batches):
    losses = [pairwise_loss(d, torch.zeros_like(d)) for d in f64(2, 0.5, -1).split(batches)]
    total = sum(losses[1:], losses[0])
    assert total.mean().item() == pytest.approx(0.638089, abs=1e-6)
    assert divide_metrics(total.metrics)["accuracy"] == pytest.approx(0.666667, abs=1e-6)


def test_a_tie_is_half_right():
    got = pairwise_loss(f64(1, 2), f64(1, 0))
    assert divide_metrics(got.metrics)["accuracy"] == 0.75


def test_the_margin_moves_the_loss_and_not_the_accuracy():
    got = pairwise_loss(f64(1), f64(0), margin_B=f64(5))
    assert divide_metrics(got.metrics) == pytest.approx({"accuracy": 1.0, "chosen_score": 1.0, "rejected_score": 0.0, "score_margin": 1.0})


def test_a_zero_weight_row_of_nan_reaches_neither_loss_nor_gradient():
    chosen = torch.tensor([1.2, NAN], requires_grad=True)
    got = pairwise_loss(chosen, torch.tensor([0.7, NAN]), margin_B=torch.tensor([0.0, NAN]), weight_B=torch.tensor([1.0, 0.0]))
    got.mean().backward()
    assert got.mean().item() == pytest.approx(0.474077, abs=1e-6) and got.count == 1
    assert chosen.grad.isfinite().all() and chosen.grad[1] == 0
    assert divide_metrics(got.metrics)["accuracy"] == 1.0


def test_pairs_of_which_one_half_is_missing_are_an_error():
    with pytest.raises(ValueError, match="shapes"):
        pairwise_loss(torch.zeros(2), torch.zeros(1))


def test_score_statistics_leave_out_what_a_sampler_repeated():
    ranks = [(f64(1, 3, 5), f64(1, 1, 1)), (f64(2, 4, 1), f64(1, 1, 0))]
    moments = sum((score_statistics(scores, weight_B=weight) for scores, weight in ranks), Moments())
    assert moments.mean == pytest.approx(3.0)
    assert moments.std(ddof=1) == pytest.approx(1.581139, abs=1e-6)
    repeated = sum((score_statistics(scores) for scores, _ in ranks), Moments())
    assert (repeated.mean, repeated.std(ddof=1)) == pytest.approx((2.666667, 1.632993), abs=1e-6)


def test_zscore():
    scores = f64(1, 2, 4)
    got = zscore(scores, score_statistics(scores))
    assert got.tolist() == pytest.approx([-0.872872, -0.218218, 1.091089], abs=1e-6)
    assert zscore(f64(5), score_statistics(f64(2, 2))).tolist() == [0.0]


def test_zscore_without_statistics_is_an_error():
    with pytest.raises(ValueError, match="numbers"):
        zscore(f64(1), Moments())


@pytest.mark.parametrize(("score", "text"), [(-0.004, "0.00"), (-0.005001, "-0.01"), (0.0, "0.00"), (1.239, "1.24")])
def test_a_score_as_text_is_never_minus_zero(score, text):
    assert format_score(score) == text
