"""Running mean and spread do not depend on how a stream is cut."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.algorithms.running import Running


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.data())
def test_any_grouping_gives_the_moments_of_the_whole(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    running = Running()
    for start, end in zip([0, *cuts], [*cuts, len(values)]):
        running = running.joined(values[start:end])
    assert running.count == len(values)
    assert running.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    spread = statistics.stdev(values)
    assert running.std == pytest.approx(spread if spread > 1e-9 else running.std, rel=1e-6, abs=1e-6)


def test_without_spread_the_divisor_is_one():
    assert Running().std == 1.0
    assert Running().joined([2.0, 2.0]).std == 1.0
