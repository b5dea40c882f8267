"""Blocks that are computed again in the backward pass keep less, and give the same model to the bit."""

import pytest

from stages.cluster.rows import Rows

from .stack import LIKELIHOOD, fresh, same_bytes, sequences

ROWS = Rows.of(sequences(12))


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
            kept[recompute] = solo.on_ranks(_kept_bytes)[0]
    assert kept[True] < 0.5 * kept[False]


def _kept_bytes(rank):
    """Bytes that one forward pass keeps for its backward pass."""
    import torch

    kept = {}
    keep = lambda x: kept.__setitem__(x.data_ptr(), x.numel() * x.element_size()) or x
    held, ids = rank._models["actor"], torch.arange(5, 69).reshape(1, -1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        held(ids, torch.arange(64).reshape(1, -1), torch.arange(64), ids[0], 1.0, None)
    weights = {p.data_ptr() for p in held.network.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in weights)
