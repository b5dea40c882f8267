"""Group baselines and filters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.baselines import group_advantages, group_filter, has_signal

NAN = float("nan")
KINDS = ["mean", "rloo", "grpo", "grpo_population", "dr_grpo"]


@pytest.mark.parametrize(
    ("kind", "advantages"),
    [
        ("mean", [1.5, -0.5, 0.5, -1.5]),
        ("dr_grpo", [1.5, -0.5, 0.5, -1.5]),
        ("rloo", [2, -0.666667, 0.666667, -2]),
        ("grpo", [1.161895, -0.387298, 0.387298, -1.161895]),
        ("grpo_population", [1.341641, -0.447214, 0.447214, -1.341641]),
    ],
)
def test_group_advantages(kind, advantages):
    got = group_advantages(torch.tensor([[3.0, 1, 2, 0]]), kind=kind)
    assert got[0].tolist() == pytest.approx(advantages, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("constant", [1.0, 0.1, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(kind, constant):
    assert not group_advantages(torch.full((2, 3), constant), kind=kind).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_is_an_error(kind):
    with pytest.raises(ValueError, match="two samples"):
        group_advantages(torch.ones(3, 1), kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_without_response_tokens_does_not_shift_its_group(kind):
    valid = torch.tensor([[True, False, True, True], [True, False, False, False]])
    got = group_advantages(torch.tensor([[3.0, NAN, 2, 0], [5.0, NAN, NAN, NAN]]), kind=kind, valid_GN=valid)
    alone = group_advantages(torch.tensor([[3.0, 2, 0]]), kind=kind)
    assert got[0][valid[0]].tolist() == pytest.approx(alone[0].tolist()) and not got[~valid].any()
    assert not got[1].any()


def test_a_nan_reward_is_an_error_that_names_the_group():
    with pytest.raises(ValueError, match=r"groups \[1\]"):
        group_advantages(torch.tensor([[0.0, 1.0], [NAN, 1.0]]), kind="mean")


def test_an_unknown_baseline_is_an_error():
    with pytest.raises(ValueError, match="unknown"):
        group_advantages(torch.tensor([[0.0, 1.0]]), kind="median")


def test_group_filter_keeps_groups_between_the_bounds_that_differ():
    rewards = torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5], [0, 1, 0, 0]])
    assert group_filter(rewards, low=0.0, high=1.0).tolist() == [False, False, False, True]
    assert has_signal(rewards).tolist() == [False, False, False, True]


def test_group_filter_refuses_an_empty_range():
    with pytest.raises(ValueError, match="low < high"):
        group_filter(torch.zeros(1, 2), low=1.0, high=1.0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-50, 50), st.sampled_from(KINDS))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_all_rewards(rewards, shift, kind):
    rewards = torch.tensor([rewards], dtype=torch.float64).mul(8).round().div(8)
    got = group_advantages(rewards, kind=kind)
    moved = group_advantages(rewards + round(shift), kind=kind)
    assert got.sum().item() == pytest.approx(0.0, abs=1e-6)
    assert moved[0].tolist() == pytest.approx(got[0].tolist(), abs=1e-6)
