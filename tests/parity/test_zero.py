"""One model comes out, whatever the objective, the ZeRO stage and the number of ranks."""

import random

import pytest

from stages.cluster.rows import Rows

from .stack import ACTOR, BRADLEY_TERRY, LIKELIHOOD, assert_same_training, fresh, sequences

OBJECTIVES = "stages.algorithms.objectives"
SINGLE, PAIRS = sequences(19), sequences(20)
# batches of 6 rows, or 3 pairs: the last of the four steps has one row, so with two ranks one has nothing but a filler
CASES = {
    "Likelihood": (LIKELIHOOD, "causal", Rows.of(SINGLE), {"batch_size": 6}),
    "BradleyTerry": (BRADLEY_TERRY, "scorer", Rows.of(PAIRS, per_row=2, last_only=True), {"batch_size": 3}),
}


def noise(seed, lengths, mean, width):
    """Values of a token field."""
    r = random.Random(seed)
    return [[r.gauss(mean, width) for _ in range(n)] for n in lengths]


def others():
    """The other objectives: (objective, kind, rows, options, companion rows)."""
    lengths = [len(response) for _, response in SINGLE]
    experience = {"old_logprobs": noise(1, lengths, -5.7, 0.2), "advantages": noise(2, lengths, 0, 1)}
    targets = {"old_values": noise(3, lengths, 3, 0.1), "returns": noise(4, lengths, 1.5, 1)}
    sums = [sum(row) for row in noise(5, [len(response) for _, response in PAIRS], -5.7, 0.2)]
    rated = {"reference": sums[:19], "label": [i % 3 > 0 for i in range(19)]}
    mismatched = [(prompt, SINGLE[i - 1][1]) for i, (prompt, _) in enumerate(SINGLE)]
    return {
        "Actor": (ACTOR, "causal", Rows.of(SINGLE, token_fields=experience),
                  {"temperature": 0.7, "clip_low": 0.2, "clip_high": 0.2}, None),
        "Critic": (f"{OBJECTIVES}.critic:Critic", "scorer", Rows.of(SINGLE, token_fields=targets), {"clip": 0.5}, None),
        "DPO": (f"{OBJECTIVES}.preference:Preference", "causal",
                Rows.of(PAIRS, per_row=2, row_fields={"reference_chosen": sums[::2], "reference_rejected": sums[1::2]}),
                {"loss": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "robust": False, "average_logprobs": False}, None),
        "KTO": (f"{OBJECTIVES}.kto:KTO", "causal", Rows.of(SINGLE, row_fields=rated),
                {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.3},
                Rows.of(mismatched, row_fields={"reference": [-99.0, *sums[:18]]})),
    }  # fmt: skip


OTHERS = others()


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def fit(case, tied):
    """A function (stack, ZeRO stage) -> Trained, over four steps of AdamW."""
    objective, kind, rows, optimizer = case

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
def test_two_ranks_train_the_same_model_as_one_with_deepspeeds_engine_of_the_stage_asked_for(fit, truth, pair, stage):
    assert_same_training(fit(pair, stage), truth)
    assert pair.on_ranks(_engine) == [
        {"type": "DeepSpeedEngine", "stage": stage, "rank": rank, "world": 2, "sharded": stage == 3} for rank in (0, 1)
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_two_ranks_under_zero_3_train_the_same_model_as_one_with_every_objective(tied, solo, pair, name):
    objective, kind, rows, options, companion = OTHERS[name]
    made = []
    for stack, stage in ((solo, 2), (pair, 3)):
        with stack.hardware(zero_stage=stage):
            optimizer = {"batch_size": 6 // rows.per_row}
            made.append(stack.fit(fresh(tied, kind), rows, objective, optimizer=optimizer, options=options, companion=companion))
    assert_same_training(made[1], made[0])


def test_optimizer_state_on_the_host_trains_the_same_model(fit, truth, pair):
    with pair.hardware(offload_optimizer=True):
        assert_same_training(fit(pair, 2), truth)
        assert pair.on_ranks(lambda rank: rank._models["actor"].engine.optimizer.cpu_offload) == [True, True]


def test_two_ranks_see_each_row_once_between_them_and_make_equally_many_micro_batches(fit, case, pair):
    with pair.recorded() as seen:
        fit(pair, 2)
    one, other = seen
    assert len(one) == len(other)
    rows = [[row for members, filler in share for row in members if not filler] for share in seen]
    assert all(rows) and sorted(rows[0] + rows[1]) == list(range(len(case[2])))
    assert any(filler for _, filler in other), "the last step, of one row, needs a filler on the other rank"


@pytest.mark.parametrize("stage", [2, 3])
def test_models_that_gave_way_to_others_are_freed(tied, pair, stage):
    with pair.hardware(zero_stage=stage):
        for _ in range(2):
            pair.fit(fresh(tied), CASES["Likelihood"][2])
            pair.score("reference", fresh(tied), CASES["Likelihood"][2], select="before")
        assert pair.on_ranks(_alive) == [0, 0]


def _alive(rank):
    """Networks in memory that no role holds."""
    import gc

    from stages.cluster.network import Network

    gc.collect()
    held = {id(model.network) for model in rank._models.values()}
    return sum(isinstance(x, Network) and id(x) not in held for x in gc.get_objects())


def _engine(rank):
    import torch

    engine = rank._models["actor"].engine
    return {
        "type": type(engine).__name__, "stage": engine.zero_optimization_stage(), "rank": torch.distributed.get_rank(),
        "world": torch.distributed.get_world_size(),
        "sharded": all(hasattr(p, "ds_id") for p in engine.module.inner.parameters()),
    }  # fmt: skip
