"""PPO's way of training, some steps at a time: the optimizer goes on where it was, warm or from its file."""

import pytest

from stages.cluster.rows import Rows

from .stack import OPTIMIZER, Trained, assert_same_training, fresh, gap, same_bytes, sequences

FIRST, SECOND = Rows.of(sequences(12, seed=1)), Rows.of(sequences(12, seed=2))
BEGIN, GO_ON = {"total_steps": 4}, {"total_steps": 4, "first_step": 2}


@pytest.fixture(params=[(1, 2), (1, 3), (2, 2), (2, 3)], ids=lambda p: f"{p[0]} ranks, ZeRO-{p[1]}")
def group(request, solo, pair):
    ranks, stage = request.param
    stack = (solo, pair)[ranks - 1]
    with stack.hardware(zero_stage=stage):
        yield stack


@pytest.fixture(scope="module")
def first(solo, tied):
    """Two steps on one rank."""
    return solo.fit(fresh(tied), FIRST, **BEGIN)


@pytest.fixture(scope="module")
def second(solo, first):
    """Two more, going on from the files."""
    return solo.fit(first.source, SECOND, role="critic", **GO_ON)


def test_going_on_from_the_files_equals_going_on_warm(group, tied):
    begun = group.fit(fresh(tied), FIRST, **BEGIN)
    held = group.on_ranks(_engine_id)
    warm = group.fit(begun.source, SECOND, **GO_ON)
    assert group.on_ranks(_engine_id) == held, "the engine of the first two steps took the next two"
    cold = group.fit(begun.source, SECOND, role="critic", **GO_ON)
    assert warm.metrics == cold.metrics and [step for step, name, _ in warm.metrics if name == "loss"] == [2, 3]
    assert same_bytes(warm.weights, cold.weights)
    assert same_bytes(warm.optimizer, cold.optimizer)
    assert float(cold.optimizer["step"]) == 4


def test_going_on_without_the_optimizer_state_is_something_else(solo, first, second):
    assert gap(solo.fit(fresh(first.folder), SECOND, **GO_ON).weights, second.weights) > (1e-3, "")


@pytest.mark.parametrize("change", [{"weight_decay": 0.5}, {"betas": (0.8, 0.9)}, {"eps": 1e-3}, {"max_grad_norm": 0.1}], ids=str)
def test_a_warm_engine_that_was_made_for_other_settings_is_not_used(solo, first, second, change):
    solo.on_ranks(_hold, first.source)
    warm = solo.fit(first.source, SECOND, optimizer=change, **GO_ON)
    cold = solo.fit(first.source, SECOND, role="critic", optimizer=change, **GO_ON)
    assert same_bytes(warm.weights, cold.weights)
    assert gap(cold.weights, second.weights) > (1e-4, "")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_write_the_optimizer_state_that_one_writes_and_go_on_from_it_alike(pair, first, second, tied, stage):
    with pair.hardware(zero_stage=stage):
        begun = pair.fit(fresh(tied), FIRST, **BEGIN)
        assert gap(begun.optimizer, first.optimizer) < (1e-6, "")
        assert_same_training(pair.fit(first.source, SECOND, **GO_ON), second)


def test_a_state_passes_through_any_group_unchanged(group, first):
    group.on_ranks(_hold, first.source)
    kept = Trained([], group.keep("actor", first.source))
    assert same_bytes(kept.optimizer, first.optimizer)
    assert same_bytes(kept.weights, first.weights)


def _engine_id(rank):
    return id(rank._models["actor"].engine)


def _hold(rank, source):
    rank._trainable("actor", source, OPTIMIZER, None)
