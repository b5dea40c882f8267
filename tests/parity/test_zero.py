"""One model comes out, whatever the ZeRO stage and the number of ranks."""

import pytest

from stages.cluster.rows import Rows

from .stack import BRADLEY_TERRY, LIKELIHOOD, assert_same_training, fresh, sequences

# the last step has a single row: with two ranks one of them has nothing but a filler
LIKELIHOOD_ROWS = Rows.of(sequences(19))
PAIR_ROWS = Rows.of(sequences(20), per_row=2, last_only=True)
CASES = {
    "Likelihood": (LIKELIHOOD, LIKELIHOOD_ROWS, "causal", {"batch_size": 6}),
    "BradleyTerry": (BRADLEY_TERRY, PAIR_ROWS, "scorer", {"batch_size": 3}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def fit(case, tied):
    """A function (stack, ZeRO stage) -> Trained, four steps of AdamW."""
    objective, rows, kind, optimizer = case

    def fit(stack, stage):
        with stack.hardware(zero_stage=stage):
            return stack.fit(fresh(tied, kind, seed=7), rows, objective, optimizer=optimizer)

    return fit


@pytest.fixture(scope="module")
def truth(fit, solo):
    made = fit(solo, 1)
    assert len(made.metric("loss")) == 4
    return made


@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_trains_the_same_model_under_any_zero_stage(fit, truth, solo, stage):
    assert_same_training(fit(solo, stage), truth)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_train_the_same_model_as_one(fit, truth, pair, stage):
    assert_same_training(fit(pair, stage), truth)


def test_offloaded_optimizer_state_trains_the_same_model(fit, truth, pair):
    with pair.hardware(offload_optimizer=True):
        assert_same_training(fit(pair, 2), truth)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engine_is_deepspeeds_and_has_the_stage_that_was_asked_for(fit, pair, stage):
    fit(pair, stage)
    assert pair.on_ranks(_engine) == [
        {"type": "DeepSpeedEngine", "stage": stage, "rank": rank, "world": 2, "parameters": "sharded" if stage == 3 else "whole"}
        for rank in (0, 1)
    ]


def test_two_ranks_see_each_row_once_between_them_and_make_equally_many_micro_batches(fit, case, pair):
    pair.on_ranks(_record_micro_batches)
    try:
        fit(pair, 2)
    finally:
        one, other = pair.on_ranks(_recorded_micro_batches)
    assert len(one) == len(other)
    rows = [[row for members, filler in seen for row in members if not filler] for seen in (one, other)]
    assert all(rows) and sorted(rows[0] + rows[1]) == list(range(len(case[1])))
    assert any(filler for _, filler in other), "the last step, of one row, needs a filler on the other rank"


def _engine(rank):
    import torch

    engine = rank._models["actor"].engine
    sharded = all(hasattr(p, "ds_id") and p.numel() == 0 for p in engine.module.inner.parameters() if p.dim() > 1)
    return {
        "type": type(engine).__name__, "stage": engine.zero_optimization_stage(), "rank": torch.distributed.get_rank(),
        "world": torch.distributed.get_world_size(), "parameters": "sharded" if sharded else "whole",
    }  # fmt: skip


def _record_micro_batches(rank):
    from stages.cluster.network import Collator

    seen, made = [], Collator.micro_batch

    def micro_batch(self, members, *, filler):
        seen.append((list(members), filler))
        return made(self, members, filler=filler)

    Collator.micro_batch = micro_batch
    rank.restore_micro_batch = lambda: setattr(Collator, "micro_batch", made) or seen


def _recorded_micro_batches(rank):
    return rank.restore_micro_batch()
