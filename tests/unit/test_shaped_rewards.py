"""Token rewards from scores and the KL penalty."""

import pytest
import torch

from stages.algorithms.masked import length_mask
from stages.algorithms.shaped_rewards import last_response_index, overlong_penalty, shaped_rewards

NAN = float("nan")


def mask(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_last_response_index():
    assert last_response_index(mask([0, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0])).tolist() == [3, 1, -1]


def test_last_response_index_comes_from_lengths_when_pad_is_eos():
    ids = torch.tensor([[7, 2, 2, 2]])
    assert last_response_index(length_mask(torch.tensor([2]), width=ids.shape[1])).tolist() == [1]


@pytest.mark.parametrize("garbage", [-3.0, NAN])
def test_the_clipped_score_is_on_the_last_response_token_not_on_the_first_pad(garbage):
    rewards, valid = shaped_rewards(
        f64(12.0),
        f64([-1, -2, -0.5, garbage]),
        f64([-1.1, -1.7, -0.9, garbage]),
        mask([1, 1, 1, 0]),
        kl_coef=0.1,
        clip=10.0,
    )
    assert rewards[0].tolist() == pytest.approx([-0.01, 0.03, 9.96, 0], abs=1e-6)
    assert rewards.sum().item() == pytest.approx(9.98, abs=1e-6)
    assert valid.tolist() == [True]


@pytest.mark.parametrize("score", [5.0, NAN])
def test_a_row_without_response_tokens_gets_no_reward_and_is_invalid(score):
    zeros = torch.zeros(1, 3)
    rewards, valid = shaped_rewards(torch.tensor([score]), zeros, zeros, mask([0, 0, 0]), kl_coef=0.1)
    assert rewards.tolist() == [[0, 0, 0]] and valid.tolist() == [False]


def test_a_nan_score_of_a_valid_row_is_an_error_that_names_the_row():
    zeros = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        shaped_rewards(torch.tensor([0.0, NAN]), zeros, zeros, mask([1], [1]), kl_coef=0.1)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_penalty_lowers_the_reward_of_leaving_the_reference(kind):
    rewards, _ = shaped_rewards(f64(0.0), f64([-0.1]), f64([-2.0]), mask([1]), kl_coef=1e6, kl_kind=kind, clip=None, kl_clamp=10.0)
    assert rewards.item() < -1e5


def test_shaped_rewards_refuse_other_shapes():
    with pytest.raises(ValueError, match="shapes"):
        shaped_rewards(torch.zeros(2), torch.zeros(1, 2), torch.zeros(1, 2), mask([1, 1]), kl_coef=0.1)


def test_overlong_penalty():
    lengths = torch.tensor([80, 81, 90, 100, 110])
    got = overlong_penalty(lengths, max_length=100, buffer=20)
    assert got.tolist() == pytest.approx([0, -0.05, -0.5, -1, -1], abs=1e-6)


def test_overlong_penalty_refuses_an_empty_buffer():
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_length=10, buffer=0)
