"""Policy and value losses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.baselines import group_advantages
from stages.algorithms.loss import divide_metrics
from stages.algorithms.ppo import clipped_surrogate, explained_variance, policy_loss, sequence_ratio, value_loss

NAN = float("nan")
RATIO = torch.tensor([[1.5, 0.7, 1.1, 0.5, 4.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, -1, 2, 1, -1]], dtype=torch.float64)
ALL = torch.ones(1, 5, dtype=torch.bool)


def loss(ratio=RATIO, advantages=ADVANTAGES, mask=ALL, **options):
    options = {"clip_low": 0.2, "clip_high": 0.2, **options}
    return policy_loss(ratio.log(), torch.zeros_like(ratio), advantages, mask, **options)


def test_policy_loss_per_token():
    got, _, _ = clipped_surrogate(RATIO, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    assert got[0].tolist() == pytest.approx([-1.2, 0.8, -2.2, -0.5, 4.0], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "mean"),
    [({}, 0.18), ({"clip_high": 0.28}, 0.164), ({"dual_clip": 3.0}, -0.02)],
)
def test_policy_loss_mean(options, mean):
    assert loss(**options).mean().item() == pytest.approx(mean, abs=1e-6)


def test_policy_loss_metrics():
    got = loss(dual_clip=3.0)
    means = divide_metrics(got.metrics)
    assert means["clip_fraction"] == pytest.approx(0.4)
    assert means["dual_clip_fraction"] == pytest.approx(0.2)
    assert means["approximate_kl_k1"] == pytest.approx(-0.167450, abs=1e-6)
    assert means["approximate_kl_k3"] == pytest.approx(RATIO.mean().item() - 1 - 0.167450, abs=1e-6)
    assert got.maxima["ratio_max"].item() == pytest.approx(4.0)
    assert got.count.item() == 5


def test_masked_nan_does_not_reach_the_loss_or_the_gradient():
    pad = torch.tensor([[NAN, float("inf"), -float("inf")]], dtype=torch.float64)
    logprobs = torch.cat([RATIO.log(), pad], dim=1).requires_grad_()
    mask = torch.cat([ALL, torch.zeros(1, 3, dtype=torch.bool)], dim=1)
    old = torch.cat([torch.zeros(1, 5), pad], dim=1)
    advantages = torch.cat([ADVANTAGES, pad], dim=1)
    got = policy_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.2, importance_BL=torch.ones_like(old))
    got.mean().backward()
    assert got.mean().item() == pytest.approx(0.18, abs=1e-6)
    assert logprobs.grad.isfinite().all() and not logprobs.grad[0, 5:].any()
    assert all(total.isfinite() for total, _ in got.metrics.values())


def test_an_all_false_row_is_a_filler_of_no_weight():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    pad = torch.full((1, 2), NAN)
    got = policy_loss(pad, pad, pad, nothing, clip_low=0.2, clip_high=0.2)
    assert (got.sum.item(), got.count.item(), got.maxima["ratio_max"].item()) == (0, 0, 0)


def test_importance_weights_multiply_the_token_losses():
    got = loss(importance_BL=torch.tensor([[0.5, 0, 1, 1, 1]]))
    assert got.sum.item() == pytest.approx(-0.6 - 2.2 - 0.5 + 4.0, abs=1e-6)
    assert got.count.item() == 5


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_leaves_loss_and_gradient_finite(advantage):
    logprobs = torch.tensor([[200.0]], requires_grad=True)
    got = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.tensor([[True]]), clip_low=0.2, clip_high=0.2)
    got.mean().backward()
    assert got.sum.isfinite() and logprobs.grad.isfinite().all()


def test_in_the_first_epoch_the_ratio_is_one_the_kl_zero_and_the_gradient_minus_the_advantage():
    logprobs = torch.tensor([[-0.3, -2.0, -1.0, -9.0, -0.01]], dtype=torch.float64, requires_grad=True)
    got = policy_loss(logprobs, logprobs.detach(), ADVANTAGES, ALL, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    got.sum.backward()
    means = divide_metrics(got.metrics)
    assert got.maxima["ratio_max"] == 1.0
    assert means["approximate_kl_k1"] == means["approximate_kl_k3"] == means["clip_fraction"] == 0.0
    assert torch.allclose(logprobs.grad, -ADVANTAGES)


def test_grpo_starts_with_loss_zero_and_a_gradient():
    advantages = group_advantages(torch.tensor([[1.0, 0, 0, 1]]), kind="grpo").T.expand(4, 3)
    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    mask = torch.ones(4, 3, dtype=torch.bool)
    got = policy_loss(logprobs, logprobs.detach(), advantages, mask, clip_low=0.2, clip_high=0.2)
    got.mean().backward()
    assert got.mean().item() == pytest.approx(0.0, abs=1e-6) and logprobs.grad.abs().min() > 0


def test_sequence_ratio_is_the_geometric_mean_over_response_tokens():
    log_ratio = torch.tensor([[1.5, 0.7, 1.1, NAN], [NAN] * 4], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True, False], [False] * 4])
    got = sequence_ratio(log_ratio, torch.zeros_like(log_ratio), mask)
    assert got.tolist() == pytest.approx([1.049206, 1.0], abs=1e-6)


@pytest.mark.parametrize(
    "options", [{"clip_low": 1.5}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"mask": ALL[:, :4]}, {"mask": ALL.float()}]
)
def test_policy_loss_refuses_impossible_options(options):
    with pytest.raises(ValueError):
        loss(**options)


def value(clip, pad=()):
    rows = [[1, 2, 0.2], [0.2, 1.9, 0.5], [1.5, 1, 0.4]]
    values, old, returns = (torch.tensor([[*row, *pad]], dtype=torch.float64) for row in rows)
    mask = torch.tensor([[True] * 3 + [False] * len(pad)])
    values.requires_grad_()
    return values, value_loss(values, old, returns, mask, clip=clip)


@pytest.mark.parametrize(("clip", "mean"), [(0.5, 0.28), (None, 0.215)])
@pytest.mark.parametrize("pad", [(), (NAN, float("inf"))])
def test_value_loss(clip, mean, pad):
    values, got = value(clip, pad)
    got.mean().backward()
    assert got.mean().item() == pytest.approx(mean, abs=1e-6)
    assert values.grad.isfinite().all() and got.count.item() == 3
    assert divide_metrics(got.metrics)["value_clip_fraction"] == pytest.approx(0 if clip is None else 1 / 3)


def test_value_loss_per_token():
    rows = torch.tensor([[1, 2, 0.2], [0.2, 1.9, 0.5], [1.5, 1, 0.4]], dtype=torch.float64)
    mask = torch.tensor([[True]])
    got = [value_loss(*(x.view(1, 1) for x in rows[:, i]), mask, clip=0.5).sum.item() for i in range(3)]
    assert got == pytest.approx([0.32, 0.50, 0.02], abs=1e-6)


def test_explained_variance_adds_up_over_micro_batches():
    generator = torch.Generator().manual_seed(0)
    returns = torch.randn(4, 6, generator=generator, dtype=torch.float64) + 3
    values = returns + 0.5 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) > 0.3
    rows = zip(values.split(1), returns.split(1), mask.split(1), strict=True)
    parts = [value_loss(v, v, r, m, clip=None) for v, r, m in rows]
    means = divide_metrics(sum(parts[1:], parts[0]).metrics)
    kept, error = returns[mask], (returns - values)[mask]
    assert explained_variance(means) == pytest.approx(1 - (error.var() / kept.var()).item(), abs=1e-9)
    constant = {"return": 1.0, "return_squared": 1.0, "residual": 0.0, "residual_squared": 0.0}
    assert math.isnan(explained_variance(constant))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]))
def test_one_by_eight_and_any_other_split_give_one_loss_and_gradient(seed, parts):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(8, 5, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(8, 5, generator=generator) > 0.4
    gradients, means = [], []
    for chunks in (1, parts):
        logprobs = draw[0].clone().requires_grad_()
        pieces = zip(*(x.chunk(chunks) for x in (logprobs, draw[1], draw[2], mask)), strict=True)
        losses = [policy_loss(*piece, clip_low=0.2, clip_high=0.2, dual_clip=3.0) for piece in pieces]
        total = sum(losses[1:], losses[0])
        total.mean().backward()
        gradients.append(logprobs.grad)
        means.append({**divide_metrics(total.metrics), "loss": total.mean().item(), "max": total.maxima["ratio_max"].item()})
    assert torch.allclose(*gradients, atol=1e-12)
    assert means[0] == pytest.approx(means[1], abs=1e-9)
