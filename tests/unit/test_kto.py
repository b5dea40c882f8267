"""KTO."""

import pytest
import torch

from stages.algorithms.kto import kto_kl, kto_loss
from stages.algorithms.loss import divide_metrics
from stages.algorithms.mismatch import mismatched_rows

NAN = float("nan")
H = torch.tensor([0.5, -1, 1], dtype=torch.float64)
LABELS = torch.tensor([True, True, False])
MISMATCHED = torch.tensor([0.6, 0.2, -0.5], dtype=torch.float64)


def loss(z, h=H, labels=LABELS, **options):
    return kto_loss(h - 3, torch.full_like(h, -3.0), labels, z, beta=0.1, **options)


def test_kto_loss_of_each_row():
    z = kto_kl(MISMATCHED.sum(), 3)
    assert z.item() == pytest.approx(0.1)
    got = [loss(z, H[i : i + 1], LABELS[i : i + 1]).sum.item() for i in range(3)]
    assert got == pytest.approx([0.490001, 0.527472, 0.522485], abs=1e-6)


@pytest.mark.parametrize(
    ("shift", "options", "mean"),
    [(0.0, {}, 0.513319), (0.0, {"undesirable_weight": 1.33}, 0.570793), (-2.0, {}, 0.512487)],
)
def test_kto_loss_mean(shift, options, mean):
    z = kto_kl((MISMATCHED + shift).sum(), 3)
    assert loss(z, **options).mean().item() == pytest.approx(mean, abs=1e-6)


def test_a_negative_estimate_gives_a_reference_point_of_zero():
    assert kto_kl((MISMATCHED - 2).sum(), 3).item() == 0.0


def test_the_reference_point_is_a_mean_over_ranks_not_a_mean_of_their_means():
    ranks = [MISMATCHED[:2], MISMATCHED[2:]]
    z = kto_kl(sum(rank.sum() for rank in ranks), sum(rank.numel() for rank in ranks))
    assert z.item() == pytest.approx(0.1)


def test_the_reference_point_carries_no_gradient():
    assert not kto_kl(torch.tensor(1.0, requires_grad=True), 2).requires_grad


def test_kto_kl_of_no_pairs_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        kto_kl(torch.tensor(0.0), 0)


def test_training_starts_at_a_half_when_policy_is_reference():
    policy = H.clone().requires_grad_()
    got = kto_loss(policy, H, LABELS, kto_kl(0.0, 3), beta=0.1)
    got.mean().backward()
    assert got.mean().item() == pytest.approx(0.5, abs=1e-6)
    assert (policy.grad < 0).tolist() == LABELS.tolist()


def test_a_zero_weight_row_of_nan_reaches_neither_loss_nor_gradient():
    policy = torch.tensor([0.5, NAN], requires_grad=True)
    reference = torch.tensor([0.0, NAN])
    got = kto_loss(policy, reference, LABELS[1:], 0.1, beta=0.1, weight_B=torch.tensor([1.0, 0.0]))
    got.mean().backward()
    assert got.mean().item() == pytest.approx(0.490001, abs=1e-6) and got.count == 1
    assert policy.grad.isfinite().all() and policy.grad[1] == 0
    assert divide_metrics(got.metrics) == pytest.approx({"desirable_reward": 0.05})


@pytest.mark.parametrize("labels", [torch.tensor([1, 1, 0]), LABELS[:2]])
def test_labels_must_be_bool_and_one_a_row(labels):
    with pytest.raises(ValueError):
        loss(0.0, labels=labels)


def test_mismatched_rows_never_meet_their_own_prompt():
    assert mismatched_rows(["a", "a", "b"]) == [2, 2, 0]
    assert mismatched_rows(["a", "b", "a"]) == [1, 2, 1]
    prompts = [0, 0, 1, 1, 1, 2, 0]
    assert all(prompts[row] != prompts[other] for row, other in enumerate(mismatched_rows(prompts)))


@pytest.mark.parametrize("prompts", [["a"], ["a", "a"]])
def test_mismatched_rows_of_one_prompt_are_an_error(prompts):
    with pytest.raises(ValueError, match="two different prompts"):
        mismatched_rows(prompts)
