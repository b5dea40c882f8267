"""KL estimates and their controller."""

import pytest
import torch

from stages.algorithms.kl import AdaptiveKL, kl_estimate


def estimate(d, kind, clamp=None):
    d = torch.tensor(d, dtype=torch.float64)
    return kl_estimate(d - 1.0, torch.full_like(d, -1.0), kind, clamp)


@pytest.mark.parametrize(
    ("kind", "values", "mean"),
    [
        ("k1", [0.1, -0.3, 0.4], 0.066667),
        ("k2", [0.005, 0.045, 0.08], 0.043333),
        ("k3", [0.004837, 0.049859, 0.070320], 0.041672),
    ],
)
def test_kl_estimate(kind, values, mean):
    got = estimate([0.1, -0.3, 0.4], kind)
    assert got.tolist() == pytest.approx(values, abs=1e-6)
    assert got.mean().item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(("kind", "values"), [("k1", [10, -3]), ("k2", [10, 4.5]), ("k3", [10, 10])])
def test_the_clamp_is_applied_to_the_estimate(kind, values):
    assert estimate([15.0, -3.0], kind, clamp=10.0).tolist() == pytest.approx(values, abs=1e-6)


def test_k3_without_a_clamp():
    assert estimate([-3.0], "k3").item() == pytest.approx(16.085537, abs=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_equal_policies_have_no_divergence_and_for_k2_k3_no_gradient(kind):
    logprobs = torch.tensor([-0.3, -7.0], requires_grad=True)
    got = kl_estimate(logprobs, logprobs.detach(), kind)
    got.sum().backward()
    assert got.tolist() == [0.0, 0.0]
    assert logprobs.grad.tolist() == ([1.0, 1.0] if kind == "k1" else [0.0, 0.0])


def test_a_clamped_k3_keeps_a_finite_gradient_where_exp_would_overflow():
    logprobs = torch.tensor([-1000.0], requires_grad=True)
    got = kl_estimate(logprobs, torch.tensor([-1.0]), "k3", clamp=10.0)
    got.sum().backward()
    assert got.item() == 10.0 and logprobs.grad.item() == 0.0


def test_kl_estimate_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="unknown"):
        estimate([0.0], "k4")
    with pytest.raises(ValueError, match="clamp"):
        estimate([0.0], "k1", clamp=0.0)


@pytest.mark.parametrize(("kl", "coefficient"), [(12, 0.100512), (6.3, 0.100128), (1, 0.099488)])
def test_adaptive_kl(kl, coefficient):
    controller = AdaptiveKL(coefficient=0.1, target=6, horizon=10000)
    assert controller.updated(kl, 256).coefficient == pytest.approx(coefficient, abs=1e-9)
    assert controller.coefficient == 0.1


@pytest.mark.parametrize("fields", [{"target": 0}, {"horizon": 0}, {"target": -1}, {"coefficient": -0.1}])
def test_adaptive_kl_refuses_a_target_or_horizon_of_zero(fields):
    with pytest.raises(ValueError, match="adaptive KL"):
        AdaptiveKL(**{"coefficient": 0.1, "target": 6, "horizon": 10, **fields})
