"""Step plans."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.planner import (
    deepspeed_scale,
    epoch_order,
    first_fit,
    micro_batch_count,
    plan_steps,
    resume_position,
)

LENGTHS = [5, 3, 7, 2, 6]
plans = given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    rows_per_step=st.integers(1, 16),
    ranks=st.integers(1, 5),
    tokens=st.integers(20, 60),
)


def test_first_fit():
    bins = first_fit(LENGTHS, 10)
    assert bins == [[0, 1, 3], [2], [4]]
    assert [sum(LENGTHS[item] for item in members) for members in bins] == [10, 7, 6]


def test_micro_batches_are_rounded_up_to_a_multiple_of_ranks():
    assert micro_batch_count(len(first_fit(LENGTHS, 10)), minimum=5, ranks=4) == 8
    assert micro_batch_count(8, minimum=5, ranks=4) == 8


def test_five_rows_on_four_ranks_are_filled_with_empty_micro_batches():
    (step,) = plan_steps([10] * 5, range(5), rows_per_step=5, ranks=4, tokens_per_micro_batch=10)
    assert step.micro_batches == [[[0], [4]], [[1], []], [[2], []], [[3], []]]


def test_fewer_rows_than_ranks_leave_no_rank_without_a_micro_batch():
    (step,) = plan_steps([3], [0], rows_per_step=8, ranks=2, tokens_per_micro_batch=10)
    assert step.micro_batches == [[[0]], [[]]]


def test_the_last_window_is_a_step_of_its_own():
    steps = plan_steps([1] * 5, range(5), rows_per_step=2, ranks=1, tokens_per_micro_batch=8)
    assert [step.rows for step in steps] == [[0, 1], [2, 3], [4]]


def test_an_order_of_several_epochs_fills_windows_across_them():
    steps = plan_steps([1] * 3, [0, 1, 2] * 2, rows_per_step=2, ranks=1, tokens_per_micro_batch=8)
    assert [step.rows for step in steps] == [[0, 1], [2, 0], [1, 2]]


@pytest.mark.parametrize(("lengths", "options"), [([9], {}), ([1], {"rows_per_step": 0}), ([1], {"ranks": 0}), ([-1], {})])
def test_impossible_plans_are_errors(lengths, options):
    with pytest.raises(ValueError):
        plan_steps(lengths, [0], **{"rows_per_step": 1, "ranks": 1, "tokens_per_micro_batch": 8, **options})


@settings(deadline=None, max_examples=150)
@plans
def test_a_plan_covers_each_row_once_with_equal_micro_batch_counts_within_the_budget(lengths, rows_per_step, ranks, tokens):
    order = epoch_order(len(lengths), seed=1, epoch=0)
    steps = plan_steps(lengths, order, rows_per_step=rows_per_step, ranks=ranks, tokens_per_micro_batch=tokens)
    assert [row for step in steps for row in step.rows] == order
    for step in steps:
        batches = [batch for rank in step.micro_batches for batch in rank]
        assert Counter(row for batch in batches for row in batch) == Counter(step.rows)
        assert len(step.micro_batches) == ranks
        assert len({len(rank) for rank in step.micro_batches}) == 1 and step.micro_batches[0]
        assert all(sum(lengths[row] for row in batch) <= tokens for batch in batches)


@settings(deadline=None, max_examples=100)
@plans
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_micro_batches(lengths, rows_per_step, ranks, tokens):
    order = epoch_order(len(lengths), seed=2, epoch=3)
    plan = plan_steps(lengths, order, rows_per_step=rows_per_step, ranks=ranks, tokens_per_micro_batch=tokens)
    alone = plan_steps(lengths, order, rows_per_step=rows_per_step, ranks=1, tokens_per_micro_batch=1000)
    assert [step.rows for step in plan] == [step.rows for step in alone]


@settings(deadline=None, max_examples=100)
@plans
def test_ranks_differ_by_no_more_than_the_longest_row(lengths, rows_per_step, ranks, tokens):
    order = range(len(lengths))
    for step in plan_steps(lengths, order, rows_per_step=rows_per_step, ranks=ranks, tokens_per_micro_batch=tokens):
        loads = [sum(lengths[row] for batch in rank for row in batch) for rank in step.micro_batches]
        assert max(loads) - min(loads) <= max(lengths[row] for row in step.rows)


def test_an_epoch_order_is_a_permutation_that_depends_on_seed_and_epoch_only():
    order = epoch_order(50, seed=1, epoch=0)
    assert sorted(order) == list(range(50))
    assert order == epoch_order(50, seed=1, epoch=0)
    others = [epoch_order(50, seed=1, epoch=1), epoch_order(50, seed=11, epoch=0), epoch_order(50, seed=0, epoch=1)]
    assert len({tuple(other) for other in [order, *others]}) == 4


def test_an_epoch_order_stays_what_it_was_in_earlier_runs():
    assert epoch_order(8, seed=0, epoch=0) == [0, 2, 1, 4, 6, 7, 3, 5]


def test_resume_counts_rows_not_batches():
    assert resume_position(8 * 128, 1000) == (1, 24)
    assert resume_position(0, 10) == (0, 0) and resume_position(10, 10) == (1, 0)


@pytest.mark.parametrize(("consumed", "n"), [(-1, 5), (0, 0)])
def test_resume_position_refuses_impossible_counts(consumed, n):
    with pytest.raises(ValueError, match="resume"):
        resume_position(consumed, n)


@pytest.mark.parametrize("ranks", [2, 4])
def test_after_a_resume_the_next_rows_are_the_same_for_any_number_of_ranks(ranks):
    _, offset = resume_position(8, 16)
    steps = plan_steps([1] * 16, range(offset, 16), rows_per_step=8, ranks=ranks, tokens_per_micro_batch=4)
    seen = [row for rank in steps[0].micro_batches for batch in rank for row in batch]
    assert sorted(seen) == list(range(8, 16))


def test_deepspeed_scale():
    sums = [2, 6, 8, 8]
    scaled = [deepspeed_scale(s, global_count=10, ranks=2, accumulation=2) for s in sums]
    assert scaled == pytest.approx([0.8, 2.4, 3.2, 3.2])
    assert sum(scaled) / 4 == pytest.approx(2.4)
    with pytest.raises(ValueError, match="at least one"):
        deepspeed_scale(0.0, global_count=0, ranks=1, accumulation=1)


def test_plans_are_made_without_torch():
    modules = "stages.algorithms.planner, stages.algorithms.schedule, stages.algorithms.best_of_n"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
