"""Compiled blocks give the same model, by less time a step; what was computed before changes no byte of it."""

import pytest

from stages.cluster.rows import Rows

from .stack import BRADLEY_TERRY, LIKELIHOOD, assert_same_training, fresh, same_bytes, sequences

SINGLE, PAIRS = Rows.of(sequences(12)), Rows.of(sequences(24), per_row=2, last_only=True)
CASES = {"a policy": (LIKELIHOOD, "causal", SINGLE), "a reward model": (BRADLEY_TERRY, "scorer", PAIRS)}


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_train_the_same_model(solo, tied, case):
    objective, kind, rows = CASES[case]
    plain = solo.fit(fresh(tied, kind), rows, objective)
    with solo.hardware(compile=True):
        assert_same_training(solo.fit(fresh(tied, kind), rows, objective), plain)


def test_two_ranks_with_compiled_blocks_train_the_same_model(pair, tied):
    plain = pair.fit(fresh(tied), SINGLE)
    with pair.hardware(compile=True):
        assert_same_training(pair.fit(fresh(tied), SINGLE), plain)


def test_compiled_blocks_score_as_plain_ones(solo, policies):
    plain = solo.score("reference", fresh(policies["untied"][0]), SINGLE, select="before")
    with solo.hardware(compile=True):
        compiled = solo.score("reference", fresh(policies["untied"][0]), SINGLE, select="before")
    assert all(abs(one - other).max() < 1e-5 for one, other in zip(plain, compiled))


def test_what_a_process_compiled_before_changes_no_byte(solo, tied):
    """A run that was killed goes on in a process that has seen other shapes."""

    def trainings(order):
        made = {}
        with solo.hardware(compile=True):
            for tokens in order:  # rows one by one, some, and all of a step at once
                with solo.hardware(micro_batch_tokens=tokens):
                    made[tokens] = solo.fit(fresh(tied), SINGLE).weights
        return made

    first = trainings([24, 60, 1000])
    solo._group("actor").stop()
    second = trainings([1000, 24, 60])
    assert all(same_bytes(second[tokens], weights) for tokens, weights in first.items())
