"""Each term and trick of the actor's training does what it is for, and none depends on how a step is split."""

import random

import pytest

from stages.cluster.rows import Rows

from .stack import ACTOR, assert_same_training, fresh, gap, same_bytes, sequences

SEQUENCES = sequences(24, prompt=(8, 8), response=(9, 16))
MIXED = Rows.of(sequences(16, seed=3, prompt=(4, 4), response=(6, 12)))
OPTIONS = {"temperature": 1.0, "clip_low": 0.2, "clip_high": 0.2}
ONE_STEP = {"batch_size": 24}
GENTLE = {"learning_rate": 3e-4}


@pytest.fixture(scope="module")
def rows(solo, tied):
    """Experience as it is right after sampling: old and reference log-probabilities are the policy's own."""
    logprobs = solo.score("actor", fresh(tied), Rows.of(SEQUENCES), select="before")
    r = random.Random(0)
    advantages = [[r.gauss(0.0, 1.0) for _ in response] for _, response in SEQUENCES]
    return Rows.of(SEQUENCES, token_fields={"old_logprobs": logprobs, "advantages": advantages, "reference_logprobs": logprobs})


@pytest.fixture(scope="module")
def train(solo, tied, rows):
    def train(stack=solo, mixed=None, optimizer=None, epochs=2, recipe=None, **options):
        return stack.fit(
            fresh(tied),
            rows,
            ACTOR,
            epochs=epochs,
            options=OPTIONS | options,
            optimizer=GENTLE | (optimizer or {}),
            mixed=mixed,
            **(recipe or {}),
        )

    return train


def drift(made, solo, rows):
    """Mean squared distance of the trained policy's log-probabilities from the old ones."""
    now = solo.score("actor", fresh(made.folder), rows, select="before")
    old = rows.split(rows.token_fields["old_logprobs"])
    return sum(float(((a - b) ** 2).sum()) for a, b in zip(now, old)) / sum(map(len, now))


def test_before_the_first_update_the_ratio_is_one_and_nothing_is_clipped_then_both_grow(train):
    made = train(epochs=8, optimizer=ONE_STEP | {"learning_rate": 1e-2, "max_grad_norm": 100.0})
    assert made.metric("ratio_max")[0] == pytest.approx(1.0, abs=1e-5)
    kl, clipped = made.metric("approximate_kl_k3"), made.metric("clip_fraction")
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and clipped[0] == 0.0
    assert kl[1] > 0.0 and kl[-1] > kl[1]
    assert clipped[-1] > 0.0


def test_a2c_is_ppo_of_one_epoch_and_one_batch(train):
    """The first step's ratio is 1, where no clip acts: the gradient is the policy gradient's."""
    clipped = train(epochs=1, optimizer=ONE_STEP)
    free = train(epochs=1, optimizer=ONE_STEP, clip_low=1.0, clip_high=1e9)
    assert same_bytes(clipped.weights, free.weights)


def test_an_entropy_bonus_leaves_more_entropy(train):
    plain, bonus = train(epochs=4), train(epochs=4, entropy_coef=100.0)
    assert bonus.metric("entropy")[0] == plain.metric("entropy")[0]
    assert bonus.metric("entropy")[-1] > 1.5 * plain.metric("entropy")[-1]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_kl_term_holds_the_policy_at_the_reference(train, solo, rows, estimator):
    free, held = train(epochs=4), train(epochs=4, kl_loss_coef=10.0, kl_loss_estimator=estimator)
    assert drift(held, solo, rows) < 0.5 * drift(free, solo, rows)
    assert held.metric("kl_loss")[0] == pytest.approx(0.0, abs=1e-9)


def test_a_frozen_actor_does_not_move_by_a_bit(train, solo, tied):
    from safetensors.torch import load_file

    made = train(epochs=1, recipe={"frozen_steps": 100})
    assert set(made.metric("learning_rate")) == {0.0}
    assert same_bytes(made.weights, load_file(tied / "model.safetensors"))
    thawed = train(epochs=1, recipe={"frozen_steps": 2})
    assert [rate > 0 for rate in thawed.metric("learning_rate")] == [False, False, True, True]


def test_training_stops_after_the_step_whose_kl_is_too_large(train):
    whole = train(epochs=4)
    kl = whole.metric("approximate_kl_k3")
    limit = sorted(kl)[len(kl) // 2]
    first = next(i for i, value in enumerate(kl) if value > limit)
    stopped = train(epochs=4, recipe={"stop_above": ("approximate_kl_k3", limit)})
    assert stopped.metric("approximate_kl_k3") == kl[: first + 1]


def test_what_is_mixed_in_is_learned(train):
    plain = train(epochs=4, mixed=MIXED, recipe={"mix_coef": 0.0})
    mixed = train(epochs=4, mixed=MIXED, recipe={"mix_coef": 1.0})
    assert plain.metric("ptx_loss")[0] == mixed.metric("ptx_loss")[0]
    assert mixed.metric("ptx_loss")[-1] < plain.metric("ptx_loss")[-1] - 0.05


def test_importance_weights_scale_a_tokens_gradient(solo, tied, rows, train):
    def weighted(value):
        fields = dict(rows.token_fields) | {"importance": rows.token_fields["advantages"] * 0 + value}
        made = Rows(rows.tokens_T, rows.lengths_S, rows.chosen_T, token_fields=fields)
        return solo.fit(fresh(tied), made, ACTOR, options=OPTIONS, optimizer=GENTLE | ONE_STEP | {"max_grad_norm": 1e6})

    plain = train(epochs=1, optimizer=ONE_STEP | {"max_grad_norm": 1e6})
    assert weighted(1.0).metric("grad_norm") == plain.metric("grad_norm")
    assert weighted(0.5).metric("grad_norm")[0] == pytest.approx(0.5 * plain.metric("grad_norm")[0], rel=1e-5)
    assert weighted(0.0).metric("grad_norm") == [0.0]


TERMS = 0.1
"""Surrogate, entropy (0.06) and KL, whose sum is three times smaller."""
ALL = {"entropy_coef": 0.01, "kl_loss_coef": 0.1, "dual_clip": 3.0}


@pytest.fixture(scope="module")
def whole(train, solo):
    with solo.hardware(micro_batch_tokens=1000):
        return train(mixed=MIXED, recipe={"mix_coef": 0.3}, **ALL)


@pytest.mark.parametrize(("tokens", "pack_length"), [(24, 0), (60, 0), (60, 64)])
def test_all_terms_together_do_not_depend_on_micro_batches_and_packing(train, solo, whole, tokens, pack_length):
    with solo.hardware(micro_batch_tokens=tokens, pack_length=pack_length):
        assert_same_training(train(mixed=MIXED, recipe={"mix_coef": 0.3}, **ALL), whole, loss_terms=TERMS)


def test_all_terms_together_do_not_depend_on_ranks(train, pair, whole):
    with pair.hardware(micro_batch_tokens=60):
        made = train(pair, mixed=MIXED, recipe={"mix_coef": 0.3}, **ALL)
    assert_same_training(made, whole, loss_terms=TERMS)
    assert gap(made.weights, whole.weights)[0] < 1e-5
