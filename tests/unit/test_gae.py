"""Advantages and returns."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.gae import discounted_returns, gae

NAN = float("nan")


def row(*values, dtype=torch.float64):
    return torch.tensor([values], dtype=dtype)


def near(actual, expected):
    assert actual[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        (1.0, 0.95, [0.346750, 0.365, 0.7], [0.846750, 0.765, 1.0]),
        (0.9, 0.8, [0.085280, 0.174, 0.7], [0.585280, 0.574, 1.0]),
    ],
)
def test_gae(gamma, lam, advantages, returns):
    mask = row(True, True, True, dtype=torch.bool)
    got = gae(row(0.1, -0.2, 1), row(0.5, 0.4, 0.3), mask, gamma=gamma, lam=lam)
    near(got[0], advantages)
    near(got[1], returns)


@pytest.mark.parametrize("garbage", [100.0, NAN, float("inf")])
def test_gae_does_not_leak_values_of_padding(garbage):
    mask = row(True, True, False, dtype=torch.bool)
    got = gae(row(0, 1, garbage), row(0, 0, garbage), mask, gamma=1.0, lam=0.95)
    near(got[0], [0.95, 1.0, 0.0])
    near(got[1], [0.95, 1.0, 0.0])


@pytest.mark.parametrize(
    ("lam", "advantages", "returns"),
    [
        (0.9, [1.1378, 1.042, 0, 0, 0.38, 0.2], [1.3378, 1.442, 0, 0, 0.98, 1.0]),
        (1.0, [1.3, 1.1, 0, 0, 0.4, 0.2], [1.5, 1.5, 0, 0, 1.0, 1.0]),
    ],
)
def test_gae_across_a_tool_turn_does_not_decay(lam, advantages, returns):
    mask = row(True, True, False, False, True, True, dtype=torch.bool)
    got = gae(row(0, 0.5, 9, 9, 0, 1), row(0.2, 0.4, 7, 7, 0.6, 0.8), mask, gamma=1.0, lam=lam)
    near(got[0], advantages)
    near(got[1], returns)


def test_discounted_returns():
    mask = row(True, True, True, dtype=torch.bool)
    near(discounted_returns(row(0, -0.1, 1), mask, gamma=0.9), [0.72, 0.8, 1.0])


def test_discounted_returns_skip_a_gap():
    mask = row(True, False, True, True, dtype=torch.bool)
    near(discounted_returns(row(0, NAN, -0.1, 1), mask, gamma=0.9), [0.72, 0.0, 0.8, 1.0])


@pytest.mark.parametrize(("gamma", "lam"), [(1.1, 0.9), (0.9, -0.1), (NAN, 1.0)])
def test_gae_refuses_discounts_outside_zero_to_one(gamma, lam):
    with pytest.raises(ValueError, match="must lie in"):
        gae(row(0.0), row(0.0), row(True, dtype=torch.bool), gamma=gamma, lam=lam)


def test_gae_refuses_other_shapes():
    with pytest.raises(ValueError, match="shapes"):
        gae(row(0.0, 1.0), row(0.0), row(True, dtype=torch.bool), gamma=1.0, lam=1.0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.booleans()), min_size=1, max_size=12),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_with_gaps_equals_gae_of_the_compacted_row(slots, gamma, lam):
    rewards, values, mask = (torch.tensor([column]) for column in zip(*slots, strict=True))
    rewards, values = rewards.double(), values.double()
    got = gae(rewards.masked_fill(~mask, NAN), values.masked_fill(~mask, NAN), mask, gamma=gamma, lam=lam)
    kept = [column[mask][None] for column in (rewards, values, mask)]
    compact = gae(*kept, gamma=gamma, lam=lam)
    for full, short in zip(got, compact, strict=True):
        assert torch.allclose(full[mask], short[0]) and not full[~mask].any()
