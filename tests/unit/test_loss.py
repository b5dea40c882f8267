"""Sums and counts that add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.loss import Loss, add_metrics, divide_metrics, metric
from stages.algorithms.planner import deepspeed_scale
from stages.algorithms.sft import token_nll_loss


def tokens(*losses):
    x = -torch.tensor([losses], dtype=torch.float64)
    return token_nll_loss(x, torch.ones_like(x, dtype=torch.bool))


def test_token_mean_over_ranks_and_micro_batches_is_not_a_mean_of_means():
    ranks = [[tokens(2), tokens(1, 1, 4)], [tokens(3, 5), tokens(0, 2, 2, 4)]]
    step = sum((part for rank in ranks for part in rank[1:]), ranks[0][0]) + ranks[1][0]
    assert step.mean().item() == pytest.approx(2.4)
    scaled = [deepspeed_scale(part.sum.item(), global_count=step.count.item(), ranks=2, accumulation=2) for rank in ranks for part in rank]
    assert scaled == pytest.approx([0.8, 2.4, 3.2, 3.2])
    assert sum(scaled) / 4 == pytest.approx(2.4)


def test_the_flushed_last_window_is_divided_by_its_own_count():
    epoch = [tokens(2, 2), tokens(4), tokens(6, 6, 6)]
    steps = [epoch[0] + epoch[1], epoch[2]]
    assert [step.mean().item() for step in steps] == pytest.approx([2.666667, 6.0], abs=1e-6)


def test_windows_without_a_flush_run_across_epochs():
    stream = [tokens(2, 2), tokens(4), tokens(6, 6, 6)] * 2
    means = [(stream[i] + stream[i + 1]).mean().item() for i in (0, 2, 4)]
    assert means == pytest.approx([2.666667, 4.4, 5.5], abs=1e-6)


def test_adding_losses_joins_metrics_by_sum_and_maxima_by_maximum():
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    left = Loss(one, one, {"a": (one, one)}, {"ratio_max": torch.tensor(3.0)})
    right = Loss(one, one, {"a": (one, one), "b": (zero, zero)}, {"ratio_max": torch.tensor(2.0)})
    both = left + right
    assert (both.sum.item(), both.count.item()) == (2.0, 2.0)
    assert both.maxima["ratio_max"] == 3.0
    assert divide_metrics(both.metrics) == {"a": 1.0}


def test_a_step_of_fillers_only_has_mean_zero_and_no_nan():
    x = torch.full((1, 2), float("nan"), requires_grad=True)
    loss = token_nll_loss(x, torch.zeros(1, 2, dtype=torch.bool))
    loss.mean().backward()
    assert loss.mean().item() == 0.0 and x.grad.tolist() == [[0.0, 0.0]]


def test_metrics_are_detached_float64():
    total, count = metric(torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.bool))
    assert not total.requires_grad and total.dtype == count.dtype == torch.float64


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=5), min_size=1, max_size=8), st.data())
def test_any_split_into_micro_batches_gives_one_sum_and_count(rows, data):
    width = max(map(len, rows))
    x = torch.full((len(rows), width), float("nan"), dtype=torch.float64)
    for i, row in enumerate(rows):
        x[i, : len(row)] = torch.tensor(row, dtype=torch.float64)
    whole = token_nll_loss(x, ~x.isnan())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [token_nll_loss(part, ~part.isnan()) for part in torch.tensor_split(x, cuts)]
    split = sum(parts[1:], parts[0])
    assert split.count == whole.count == sum(map(len, rows))
    assert split.sum.item() == pytest.approx(whole.sum.item(), abs=1e-9)
    assert add_metrics(whole.metrics, {}) == whole.metrics
