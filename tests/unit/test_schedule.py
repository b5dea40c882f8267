"""Learning-rate schedules."""

import pytest

from stages.algorithms.schedule import learning_rate_factor


@pytest.mark.parametrize(("step", "factor"), [(0, 0), (1, 0.333333), (50, 0.571853), (100, 0.1), (500, 0.1)])
def test_cosine_with_a_floor(step, factor):
    got = learning_rate_factor(step, kind="cosine", warmup_steps=3, total_steps=100, floor=0.1)
    assert got == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize(("step", "factor"), [(0, 0), (5, 0.5), (10, 1), (55, 0.6), (100, 0.2), (101, 0.2)])
def test_linear(step, factor):
    got = learning_rate_factor(step, kind="linear", warmup_steps=10, total_steps=100, floor=0.2)
    assert got == pytest.approx(factor)


@pytest.mark.parametrize(("step", "factor"), [(0, 0), (1, 0.5), (2, 1), (10**6, 1)])
def test_constant_after_the_warm_up(step, factor):
    assert learning_rate_factor(step, kind="constant", warmup_steps=2) == factor


def test_without_a_warm_up_the_first_step_has_the_peak():
    assert learning_rate_factor(0, kind="cosine", total_steps=10) == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "constant", "floor": 0.1},
        {"kind": "constant", "total_steps": 10},
        {"kind": "cosine"},
        {"kind": "linear", "warmup_steps": 10, "total_steps": 10},
        {"kind": "linear", "total_steps": 10, "floor": 1.5},
        {"kind": "polynomial", "total_steps": 10},
        {"kind": "constant", "step": -1},
    ],
)
def test_options_that_cannot_be_or_are_not_read_are_errors(options):
    with pytest.raises(ValueError):
        learning_rate_factor(**{"step": 0, **options})
