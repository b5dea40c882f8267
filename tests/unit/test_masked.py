"""Masked sums, moments and whitening."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.masked import Moments, check_mask, length_mask, masked_max, masked_mean, masked_sum, whiten

NAN = float("nan")
WHITE_X = torch.tensor([[1.0, 2, 3, 99], [4, 99, 99, 99]], dtype=torch.float64)
WHITE_MASK = torch.tensor([[True, True, True, False], [True, False, False, False]])


def near(actual, expected):
    assert torch.as_tensor(actual).tolist() == pytest.approx(expected, abs=1e-6)


def test_length_mask_comes_from_lengths_so_pad_may_equal_eos():
    assert length_mask(torch.tensor([2, 0]), width=3).tolist() == [[True, True, False], [False] * 3]
    assert length_mask(torch.tensor([2]), width=4, start_B=torch.tensor([1])).tolist() == [[False, True, True, False]]


def test_length_mask_refuses_a_row_beyond_the_width():
    with pytest.raises(ValueError, match="within"):
        length_mask(torch.tensor([3]), width=4, start_B=torch.tensor([2]))


def test_masked_mean_ignores_a_masked_nan():
    x, mask = torch.tensor([1.0, 3.0, NAN]), torch.tensor([True, True, False])
    assert masked_mean(x, mask).item() == 2.0


def test_masked_sum_of_an_all_false_mask_is_zero_over_zero_not_nan():
    total, count = masked_sum(torch.tensor([NAN, NAN]), torch.tensor([False, False]))
    assert (total.item(), count.item()) == (0.0, 0.0)
    assert masked_mean(torch.tensor([NAN]), torch.tensor([False])).item() == 0.0


def test_masked_nan_and_inf_do_not_reach_the_gradient():
    x = torch.tensor([2.0, NAN, float("inf")], requires_grad=True)
    masked_sum(x * x, torch.tensor([True, False, False]))[0].backward()
    assert x.grad[0] == 4.0
    y = torch.tensor([2.0, NAN], requires_grad=True)
    masked_sum(y, torch.tensor([True, False]))[0].backward()
    assert y.grad.tolist() == [1.0, 0.0]


def test_masked_sum_with_weights_counts_weights_and_skips_zero_weight_nan():
    total, count = masked_sum(torch.tensor([2.0, 4.0, NAN]), torch.tensor([0.5, 2.0, 0.0]))
    assert (total.item(), count.item()) == (9.0, 2.5)


def test_half_precision_is_summed_in_float32():
    total, _ = masked_sum(torch.ones(4096, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bool))
    assert total.dtype == torch.float32 and total.item() == 4096


def test_masked_max_of_nothing_is_the_given_value():
    assert masked_max(torch.tensor([NAN, 2.0]), torch.tensor([False, True]), empty=0.0) == 2.0
    assert masked_max(torch.tensor([NAN]), torch.tensor([False]), empty=0.0) == 0.0


def test_masks_must_be_bool_and_of_the_shape_of_the_tensor():
    with pytest.raises(ValueError, match="bool"):
        check_mask(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="shapes"):
        masked_sum(torch.zeros(2, 3), torch.ones(3, dtype=torch.bool))


def test_whiten_by_population_variance():
    near(whiten(WHITE_X, WHITE_MASK)[0], [-1.341641, -0.447214, 0.447214, 0])
    near(whiten(WHITE_X, WHITE_MASK)[1], [1.341641, 0, 0, 0])


def test_whiten_by_unbiased_variance():
    near(whiten(WHITE_X, WHITE_MASK, unbiased=True)[0], [-1.161895, -0.387298, 0.387298, 0])
    near(whiten(WHITE_X, WHITE_MASK, unbiased=True)[1], [1.161895, 0, 0, 0])


def test_whiten_without_shift_keeps_the_mean():
    near(masked_mean(whiten(WHITE_X, WHITE_MASK, shift_mean=False), WHITE_MASK), 2.5)


def test_whiten_of_rows_split_over_two_ranks_gives_the_same_numbers():
    moments = Moments.of(WHITE_X[:1], WHITE_MASK[:1]) + Moments.of(WHITE_X[1:], WHITE_MASK[1:])
    assert (moments.mean, moments.variance()) == (2.5, 1.25)
    near(whiten(WHITE_X[1:], WHITE_MASK[1:], moments=moments)[0], [1.341641, 0, 0, 0])


@pytest.mark.parametrize("constant", [0.1, 1e6 + 0.1, -7.3])
def test_whiten_of_constants_is_exactly_zero(constant):
    x, mask = torch.full((3, 5), constant), torch.ones(3, 5, dtype=torch.bool)
    assert not whiten(x, mask).any()
    ranks = Moments.of(x[:1], mask[:1]) + Moments.of(x[1:], mask[1:])
    assert ranks.m2 == 0.0 and not whiten(x, mask, moments=ranks).any()


def test_whiten_of_nothing_is_zero_and_masked_nan_stays_out():
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert whiten(torch.tensor([[NAN, NAN]]), nothing).tolist() == [[0.0, 0.0]]
    x = torch.tensor([[1.0, NAN, 3.0]])
    near(whiten(x, ~x.isnan())[0], [-1, 0, 1])


def test_variance_refuses_too_few_numbers():
    with pytest.raises(ValueError, match="more than 1"):
        Moments.of(torch.tensor([1.0]), torch.tensor([True])).variance(ddof=1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), st.data())
def test_moments_do_not_depend_on_how_the_numbers_are_split(numbers, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=3)))
    x = torch.tensor(numbers, dtype=torch.float64)
    parts = torch.tensor_split(x, cuts)
    joined = sum((Moments.of(part, torch.ones_like(part, dtype=torch.bool)) for part in parts), Moments())
    assert joined.count == len(numbers)
    assert joined.mean == pytest.approx(x.mean().item(), abs=1e-9)
    assert joined.variance(1) == pytest.approx(x.var().item(), rel=1e-9, abs=1e-9)
