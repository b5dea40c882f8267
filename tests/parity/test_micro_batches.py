"""How a step is cut into micro-batches, or packed into rows, changes neither its loss nor what comes out."""

import pytest

from stages.cluster.rows import Rows

from .stack import BRADLEY_TERRY, LIKELIHOOD, assert_same_training, fresh, sequences

# 17 to 24 tokens: none fits beside another into 24, half of a step's eight do into 110, two or three into a packed row of 64
SINGLE = Rows.of(sequences(24, prompt=(8, 8), response=(9, 16)))
PAIRS = Rows.of(sequences(32, prompt=(4, 4), response=(5, 8)), per_row=2, last_only=True)
CASES = {
    "Likelihood": (LIKELIHOOD, "causal", SINGLE, {"batch_size": 8}),
    "BradleyTerry": (BRADLEY_TERRY, "scorer", PAIRS, {"batch_size": 8}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def fit(case, tied):
    """A function (stack, hardware) -> (Trained, micro-batches a step on rank 0)."""
    objective, kind, rows, optimizer = case

    def fit(stack, **hardware):
        with stack.hardware(**hardware), stack.recorded() as seen:
            made = stack.fit(fresh(tied, kind), rows, objective, optimizer=optimizer)
        return made, len(seen[0]) / len(made.metric("loss"))

    return fit


@pytest.fixture(scope="module")
def whole(fit, solo):
    """Every step in one micro-batch."""
    made, micro_batches = fit(solo, micro_batch_tokens=1000)
    assert micro_batches == 1
    return made


@pytest.mark.parametrize(("tokens", "wanted"), [(24, 8), (110, 2)])
def test_eight_two_and_one_micro_batches_a_step_train_the_same_model(fit, whole, solo, tokens, wanted):
    made, micro_batches = fit(solo, micro_batch_tokens=tokens)
    assert micro_batches == wanted
    assert_same_training(made, whole)


@pytest.mark.parametrize("tokens", [60, 1000])
def test_packed_rows_train_the_same_model(fit, whole, solo, tokens):
    assert_same_training(fit(solo, micro_batch_tokens=tokens, pack_length=64)[0], whole)


def test_packed_rows_on_two_ranks_train_the_same_model(fit, whole, pair):
    assert_same_training(fit(pair, micro_batch_tokens=60, pack_length=64)[0], whole)


def test_a_packed_row_holds_several_sequences(solo, tied):
    assert solo.on_ranks(_shape, SINGLE, 0) == [(8, int(SINGLE.lengths_S[:8].max()))]
    assert solo.on_ranks(_shape, SINGLE, 64) == [(-(-int(SINGLE.lengths_S[:8].sum()) // 64), 64)]


def _shape(rank, rows, pack_length):
    import torch

    from stages.cluster.network import Collator

    collator = Collator(rows, select="before", pack_length=pack_length, pad_id=0, device=torch.device("cpu"))
    return tuple(collator.inputs(list(range(8)))[0].shape)
