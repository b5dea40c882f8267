"""What is computed again in the backward pass, blocks or log-probabilities, keeps less, and gives the same model."""

import pytest

from stages.cluster.rows import Rows

from .stack import ACTOR, LIKELIHOOD, assert_same_training, fresh, same_bytes, sequences

SEQUENCES = sequences(12)
ROWS = Rows.of(SEQUENCES)


@pytest.mark.parametrize(("ranks", "stage", "compiled"), [(1, 2, False), (2, 2, False), (2, 3, False), (1, 2, True)])
def test_recomputed_blocks_train_the_same_bytes(solo, pair, tied, ranks, stage, compiled):
    stack = (solo, pair)[ranks - 1]
    with stack.hardware(zero_stage=stage, compile=compiled):
        plain = stack.fit(fresh(tied), ROWS, LIKELIHOOD)
        with stack.hardware(recompute=True):
            made = stack.fit(fresh(tied), ROWS, LIKELIHOOD)
    assert made.metrics == plain.metrics
    assert same_bytes(made.weights, plain.weights) and same_bytes(made.optimizer, plain.optimizer)


def test_what_is_kept_for_the_backward_pass_is_a_fraction(solo, tied):
    kept = {}
    for recompute in (False, True):
        with solo.hardware(recompute=recompute):
            solo.fit(fresh(tied), ROWS, LIKELIHOOD)
            kept[recompute] = solo.on_ranks(_kept_bytes, None)[0]
    assert kept[True] < 0.5 * kept[False]


@pytest.fixture
def few_rows(solo, pair):
    """Log-probabilities are taken of 16 rows at a time: of a real model, that many are as large as a whole micro-batch of ours."""
    for stack in (solo, pair):
        stack.on_ranks(_rows_at_a_time, 16)
    yield
    for stack in (solo, pair):
        stack.on_ranks(_rows_at_a_time, 2048)


TERMS = {"temperature": 0.7, "clip_low": 0.2, "clip_high": 0.2, "entropy_coef": 0.01}
FIELDS = {
    "old_logprobs": [[-5.0] * len(response) for _, response in SEQUENCES],
    "advantages": [[(-1.0) ** i for i in range(len(response))] for _, response in SEQUENCES],
}


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 2), (2, 3)])
def test_log_probabilities_and_entropies_in_parts_train_the_same_model(solo, pair, tied, request, ranks, stage):
    stack = (solo, pair)[ranks - 1]
    rows = Rows.of(SEQUENCES, token_fields=FIELDS)
    with stack.hardware(zero_stage=stage):
        whole = stack.fit(fresh(tied), rows, ACTOR, options=TERMS)
        request.getfixturevalue("few_rows")
        assert_same_training(stack.fit(fresh(tied), rows, ACTOR, options=TERMS), whole, loss_terms=1.0)


def test_copies_of_logits_are_not_kept_for_the_backward_pass(solo, tied, request):
    solo.fit(fresh(tied), ROWS, LIKELIHOOD)
    whole = solo.on_ranks(_kept_bytes, "trained entropy")[0]
    request.getfixturevalue("few_rows")
    assert solo.on_ranks(_kept_bytes, "trained entropy")[0] < whole - 3 * 64 * 300 * 4


def _rows_at_a_time(rank, rows):
    from stages.cluster import network

    network._ROWS_AT_A_TIME = rows


def _kept_bytes(rank, statistic):
    """Bytes that one forward pass keeps for its backward pass."""
    import torch

    kept = {}
    keep = lambda x: kept.__setitem__(x.data_ptr(), x.numel() * x.element_size()) or x
    held, ids = rank._models["actor"], torch.arange(5, 69).reshape(1, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        held(ids, torch.arange(64).reshape(1, -1), torch.arange(64), ids[0], 0.7, statistic)
    weights = {p.data_ptr() for p in held.network.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in weights)
