"""A training that was stopped or killed goes on from its saved state and ends as if nothing had happened."""

import json
import re
import shutil

import pytest
import ray

from stages.cluster.rows import Rows
from stages.runner import Cancelled

from .stack import BRADLEY_TERRY, LIKELIHOOD, assert_same_training, fresh, same_bytes, sequences

ROWS = Rows.of(sequences(22))
PAIRS = Rows.of(sequences(22), per_row=2, last_only=True)
CASES = {
    "Likelihood": (LIKELIHOOD, "causal", ROWS, {"batch_size": 6}),
    "BradleyTerry": (BRADLEY_TERRY, "scorer", PAIRS, {"batch_size": 3}),
}
STEPS = 8


def fit(stack, folder, case="Likelihood", precision="float32", **recipe):
    objective, kind, rows, optimizer = CASES[case]
    return stack.fit(fresh(folder, kind, precision=precision), rows, objective, epochs=2, optimizer=optimizer, save_every=2, **recipe)


@pytest.fixture
def slowly():
    """A function (stack): its ranks wait 0.3 s after each step, so that something can happen in the middle."""
    slowed = []

    def slowly(stack):
        stack.on_ranks(_slow, 0.3)
        slowed.append(stack)

    yield slowly
    for stack in slowed:
        stack.on_ranks(_slow, 0.0)


def interrupt(stack, at, action):
    """Call action once, when the watching client has seen that many steps."""

    def watch(done):
        if done >= at:
            stack.context.watch = lambda done: None
            action()

    stack.context.watch = watch


def cancelled(stack, folder, state, **options):
    """Train until the client goes away in the middle; the steps that the saved state has."""
    interrupt(stack, 2, stack.context.cancelled.set)
    with pytest.raises(Cancelled):
        fit(stack, folder, state=str(state), **options)
    stack.context.cancelled.clear()
    (left,) = state.glob("step-*")
    done = json.loads((left / "progress.json").read_text())["step"]
    assert 2 <= done < STEPS
    return done


def assert_same_bytes(made, undisturbed):
    assert made.metrics == undisturbed.metrics
    assert sorted({step for step, _, _ in made.metrics}) == list(range(STEPS))
    assert same_bytes(made.weights, undisturbed.weights)
    assert same_bytes(made.optimizer, undisturbed.optimizer)


@pytest.mark.parametrize("case", CASES)
def test_a_cancelled_training_goes_on_to_the_same_bytes_and_on_two_ranks_to_the_same_model(tied, solo, pair, tmp_path, slowly, case):
    undisturbed = fit(solo, tied, case)
    slowly(solo)
    cancelled(solo, tied, tmp_path / "state", case=case)
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    solo.on_ranks(_slow, 0.0)
    assert_same_bytes(fit(solo, tied, case, state=str(tmp_path / "state")), undisturbed)
    assert_same_training(fit(pair, tied, case, state=str(tmp_path / "copy")), undisturbed)


def test_under_zero_3_a_training_cancelled_on_two_ranks_goes_on_to_the_same_bytes_and_on_one_to_the_same_model(
    tied, solo, pair, tmp_path, slowly
):
    with pair.hardware(zero_stage=3):
        undisturbed = fit(pair, tied)
        slowly(pair)
        cancelled(pair, tied, tmp_path / "state")
        shutil.copytree(tmp_path / "state", tmp_path / "copy")
        pair.on_ranks(_slow, 0.0)
        assert_same_bytes(fit(pair, tied, state=str(tmp_path / "state")), undisturbed)
    assert_same_training(fit(solo, tied, state=str(tmp_path / "copy")), undisturbed)


def test_a_training_in_bfloat16_goes_on_from_its_float32_masters_to_the_same_bytes(tied, solo, tmp_path, slowly):
    undisturbed = fit(solo, tied, precision="bfloat16")
    slowly(solo)
    cancelled(solo, tied, tmp_path / "state", precision="bfloat16")
    solo.on_ranks(_slow, 0.0)
    assert_same_bytes(fit(solo, tied, precision="bfloat16", state=str(tmp_path / "state")), undisturbed)


def test_a_killed_rank_takes_its_group_down_and_the_next_group_ends_in_the_same_bytes(tied, pair, tmp_path, slowly):
    undisturbed = fit(pair, tied)
    processes = pair.on_ranks(_pid)
    slowly(pair)
    interrupt(pair, 3, lambda: ray.kill(pair.start()[1]))
    pair.context.logged.clear()
    made = fit(pair, tied, state=str(tmp_path / "state"))
    died, went_on = pair.context.logged
    assert "starts again" in died and re.search(r"goes on after \d+ steps", went_on)
    assert not set(processes) & set(pair.on_ranks(_pid))
    assert_same_bytes(made, undisturbed)


def test_the_state_of_a_cancelled_training_is_one_folder_and_nothing_half_written(tied, solo, tmp_path, slowly):
    slowly(solo)
    done = cancelled(solo, tied, tmp_path / "state")
    assert sorted(p.name for p in tmp_path.joinpath("state").iterdir()) == ["reached", f"step-{done:08d}"]
    names = {p.name for p in tmp_path.joinpath("state", f"step-{done:08d}").iterdir()}
    assert names == {"weights.safetensors", "optimizer.safetensors", "progress.json"}


def _slow(rank, seconds):
    import time

    report = type(rank)._report

    def slow(progress):
        time.sleep(seconds)
        report(rank, progress)

    rank._report = slow


def _pid(rank):
    import os

    return os.getpid()
