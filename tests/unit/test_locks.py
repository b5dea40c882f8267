"""Locks of a project: one job on a key, many users of results, and nobody beside who frees them."""

import threading

import pytest

from stages import locks
from stages.errors import UserError


def test_a_second_job_on_a_key_says_that_it_waits_and_comes_after_the_first(tmp_path):
    order, waits = [], threading.Event()

    def second():
        with locks.one_at_a_time(tmp_path, "key", waiting=waits.set):
            order.append("second")

    thread = threading.Thread(target=second)
    with locks.one_at_a_time(tmp_path, "key"), locks.one_at_a_time(tmp_path, "another key"):
        thread.start()
        assert waits.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_who_waits_may_give_up(tmp_path):
    def tick():
        raise TimeoutError

    with locks.one_at_a_time(tmp_path, "key"), pytest.raises(TimeoutError), locks.one_at_a_time(tmp_path, "key", tick=tick):
        pass


def test_many_use_the_results_and_nobody_frees_them_meanwhile(tmp_path):
    with (
        locks.shared(tmp_path),
        locks.shared(tmp_path),
        pytest.raises(UserError, match="is running here"),
        locks.alone(tmp_path),
    ):
        pass
    with locks.alone(tmp_path):
        pass
