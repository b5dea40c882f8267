"""PPO's way of training, some steps at a time: the optimizer goes on where it was, warm or from its file."""

import pytest

from stages.cluster.rows import Rows

from .stack import OPTIMIZER, Trained, assert_same_training, fresh, gap, same_bytes, sequences

FIRST, SECOND = Rows.of(sequences(12, seed=1)), Rows.of(sequences(12, seed=2))
CLOCK = {"total_steps": 4}


@pytest.fixture(params=[(1, 2), (1, 3), (2, 2), (2, 3)], ids=lambda p: f"{p[0]} ranks, ZeRO-{p[1]}")
def group(request, solo, pair):
    ranks, stage = request.param
    stack = (solo, pair)[ranks - 1]
    with stack.hardware(zero_stage=stage):
        yield stack


def test_going_on_from_the_files_equals_going_on_warm(group, tied):
    first = group.fit(fresh(tied), FIRST, **CLOCK)
    held = group.on_ranks(_engine_id, "actor")
    warm = group.fit(first.source, SECOND, first_step=2, **CLOCK)
    assert group.on_ranks(_engine_id, "actor") == held, "the warm engine went on"
    cold = group.fit(first.source, SECOND, role="critic", first_step=2, **CLOCK)
    assert warm.metrics == cold.metrics and [step for step, name, _ in warm.metrics if name == "loss"] == [2, 3]
    assert same_bytes(warm.weights, cold.weights)
    assert same_bytes(warm.optimizer, cold.optimizer)
    assert float(cold.optimizer["step"]) == 4


def test_two_times_two_steps_are_four_steps_of_one_optimizer(solo, tied):
    first = solo.fit(fresh(tied), FIRST, **CLOCK)
    second = solo.fit(first.source, FIRST, seed=6, first_step=2, **CLOCK)
    restarted = solo.fit(fresh(first.folder), FIRST, seed=6, first_step=2, **CLOCK)
    assert gap(restarted.weights, second.weights) > (1e-3, ""), "a new optimizer would have been noticed"


@pytest.mark.parametrize("change", [{"weight_decay": 0.5}, {"betas": (0.8, 0.9)}, {"eps": 1e-3}, {"max_grad_norm": 0.1}], ids=str)
def test_going_on_warm_with_other_settings_of_the_optimizer_obeys_them(solo, tied, change):
    first = solo.fit(fresh(tied), FIRST, **CLOCK)
    warm = solo.fit(first.source, SECOND, first_step=2, optimizer=change, **CLOCK)
    cold = solo.fit(first.source, SECOND, role="critic", first_step=2, optimizer=change, **CLOCK)
    assert same_bytes(warm.weights, cold.weights)
    same = solo.fit(first.source, SECOND, role="reward", first_step=2, **CLOCK)
    assert gap(same.weights, cold.weights) > (1e-4, "")


def test_one_and_two_ranks_write_the_same_optimizer_state(solo, pair, tied):
    one = solo.fit(fresh(tied), FIRST, **CLOCK)
    for stage in (1, 2, 3):
        with pair.hardware(zero_stage=stage):
            two = pair.fit(fresh(tied), FIRST, **CLOCK)
        assert gap(two.optimizer, one.optimizer) < (1e-6, "")


def test_a_state_passes_through_any_group_unchanged(group, solo, tied):
    first = solo.fit(fresh(tied), FIRST, **CLOCK)
    group.on_ranks(_hold, first.source, OPTIMIZER)
    kept = group.keep("actor", first.source)
    assert same_bytes(Trained([], kept).optimizer, first.optimizer)
    assert same_bytes(Trained([], kept).weights, first.weights)


def test_training_goes_on_with_another_number_of_ranks(solo, pair, tied):
    first = solo.fit(fresh(tied), FIRST, **CLOCK)
    one = solo.fit(first.source, SECOND, first_step=2, **CLOCK)
    for stage in (1, 2, 3):
        with pair.hardware(zero_stage=stage):
            two = pair.fit(first.source, SECOND, first_step=2, **CLOCK)
        assert_same_training(two, one)


def _engine_id(rank, role):
    return id(rank._models[role].engine)


def _hold(rank, source, optimizer):
    rank._trainable("actor", source, optimizer, None)
