"""DPO and its family."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.loss import divide_metrics
from stages.algorithms.preference import preference_loss

NAN = float("nan")
PAIRS = tuple(torch.tensor(row, dtype=torch.float64) for row in ([-10.0, -12], [-11.0, -9], [-10.5, -11], [-10.8, -10]))
LENGTHS = {"chosen_length_B": torch.tensor([5, 4]), "rejected_length_B": torch.tensor([8, 3])}


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"kind": "sigmoid"}, 0.728449),
        ({"kind": "sigmoid", "label_smoothing": 0.1}, 0.721949),
        ({"kind": "sigmoid", "label_smoothing": 0.1, "robust": True}, 0.736574),
        ({"kind": "ipo"}, 33.745),
        ({"kind": "ipo", **LENGTHS}, 27.469618),
    ],
)
def test_preference_loss_mean(options, mean):
    assert preference_loss(*PAIRS, beta=0.1, **options).mean().item() == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "losses"),
    [
        ({"kind": "sigmoid"}, [0.658760, 0.798139]),
        ({"kind": "sigmoid", "label_smoothing": 0.1}, [0.665760, 0.778139]),
        ({"kind": "ipo"}, [18.49, 49.0]),
    ],
)
def test_preference_loss_of_each_pair(options, losses):
    got = [preference_loss(*(x[i : i + 1] for x in PAIRS), beta=0.1, **options).sum.item() for i in (0, 1)]
    assert got == pytest.approx(losses, abs=1e-6)


def test_implicit_rewards_and_accuracy():
    rows = [preference_loss(*(x[i : i + 1] for x in PAIRS), kind="sigmoid", beta=0.1) for i in (0, 1)]
    means = [divide_metrics(row.metrics) for row in rows]
    assert [m["chosen_reward"] for m in means] == pytest.approx([0.05, -0.1], abs=1e-6)
    assert [m["rejected_reward"] for m in means] == pytest.approx([-0.02, 0.1], abs=1e-6)
    assert [m["reward_margin"] for m in means] == pytest.approx([0.07, -0.2], abs=1e-6)
    assert divide_metrics((rows[0] + rows[1]).metrics)["accuracy"] == 0.5


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"kind": "sigmoid"}, math.log(2)),
        ({"kind": "sigmoid", "label_smoothing": 0.1}, math.log(2)),
        ({"kind": "ipo"}, 25.0),
    ],
)
def test_training_starts_at_the_known_loss_when_policy_is_reference(options, start):
    chosen = PAIRS[0].clone().requires_grad_()
    got = preference_loss(chosen, PAIRS[1], PAIRS[0], PAIRS[1], beta=0.1, **options)
    got.mean().backward()
    assert got.mean().item() == pytest.approx(start, abs=1e-6)
    assert (chosen.grad < 0).all()
    assert divide_metrics(got.metrics)["accuracy"] == 0.5


@pytest.mark.parametrize("options", [{"kind": "sigmoid"}, {"kind": "ipo"}, {"kind": "ipo", "lengths": True}])
def test_a_zero_weight_row_of_nan_reaches_neither_loss_nor_gradient(options):
    lengths = {name: torch.tensor([*n.tolist(), 0]) for name, n in LENGTHS.items()} if "lengths" in options else {}
    padded = [torch.cat([x, torch.tensor([NAN])]).requires_grad_() for x in PAIRS]
    weight = torch.tensor([1.0, 1.0, 0.0])
    got = preference_loss(*padded, kind=options["kind"], beta=0.1, weight_B=weight, **lengths)
    want = preference_loss(*PAIRS, kind=options["kind"], beta=0.1, **(LENGTHS if lengths else {}))
    got.mean().backward()
    assert got.mean().item() == pytest.approx(want.mean().item(), abs=1e-9) and got.count == 2
    assert all(x.grad.isfinite().all() and x.grad[2] == 0 for x in padded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ipo", "label_smoothing": 0.1}, "neither"),
        ({"kind": "ipo", "robust": True}, "neither"),
        ({"kind": "sigmoid", "robust": True}, "robust"),
        ({"kind": "sigmoid", "label_smoothing": 0.5}, "label_smoothing"),
        ({"kind": "sigmoid", "beta": 0.0}, "beta"),
        ({"kind": "hinge"}, "unknown"),
        ({"kind": "ipo", "chosen_length_B": LENGTHS["chosen_length_B"]}, "lengths"),
    ],
)
def test_an_option_that_the_loss_does_not_read_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        preference_loss(*PAIRS, **{"beta": 0.1, **options})


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 7), st.sampled_from(["sigmoid", "ipo"]))
def test_micro_batches_and_fillers_change_neither_loss_nor_gradient(seed, size, kind):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    gradients, means = [], []
    for batch in (7, size):
        policy = rows[0].clone().requires_grad_()
        parts = [preference_loss(*part, kind=kind, beta=0.1) for part in zip(*(x.split(batch) for x in (policy, *rows[1:])), strict=True)]
        filler = torch.full((1,), NAN)
        parts.append(preference_loss(*[filler] * 4, kind=kind, beta=0.1, weight_B=torch.zeros(1)))
        total = sum(parts[1:], parts[0])
        total.mean().backward()
        gradients.append(policy.grad)
        means.append({"loss": total.mean().item(), **divide_metrics(total.metrics)})
    assert torch.allclose(*gradients, atol=1e-12)
    assert means[0] == pytest.approx(means[1], abs=1e-9)
