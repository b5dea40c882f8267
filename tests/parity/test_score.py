"""Scores are those of a plain transformers forward, in the order of the rows."""

import pytest
import torch

from stages.cluster.rows import Rows

from .stack import ACTOR, fresh, sequences

SEQUENCES = sequences(17)
ROWS = Rows.of(SEQUENCES)
LAST = Rows.of(SEQUENCES, last_only=True)
PAIRS = Rows.of(SEQUENCES[:16], per_row=2, last_only=True)
GROUPS = [(1, 2, 64), (2, 2, 0), (2, 3, 0)]


@pytest.fixture(params=GROUPS, ids=lambda p: f"{p[0]} ranks, ZeRO-{p[1]}, packed into {p[2]}")
def group(request, solo, pair):
    ranks, stage, pack_length = request.param
    stack = (solo, pair)[ranks - 1]
    with stack.hardware(zero_stage=stage, pack_length=pack_length):
        yield stack


def forward(model, prompt, response):
    """Logits that predict the response."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.allclose(torch.tensor(one), other, rtol=0, atol=1e-5) for one, other in zip(ours, theirs))


def test_log_probabilities_and_entropies_are_those_of_transformers_at_the_temperature(group, policies):
    from transformers import AutoModelForCausalLM

    folder = policies["untied"][0]
    model, source = AutoModelForCausalLM.from_pretrained(folder), fresh(folder)
    scaled = [(forward(model, p, r) / 0.7).log_softmax(-1) for p, r in SEQUENCES]
    wanted = [x.gather(-1, torch.tensor(r)[:, None]).squeeze(-1) for x, (_, r) in zip(scaled, SEQUENCES)]
    assert same(group.score("actor", source, ROWS, select="before", temperature=0.7), wanted)
    entropies = [-(x.exp() * x).sum(-1) for x in scaled]
    both = group.score("actor", source, ROWS, select="before", temperature=0.7, statistic="entropy")
    assert same(both, [torch.stack(pair) for pair in zip(wanted, entropies)])


def test_values_are_read_before_each_token_and_scores_at_the_last(group, reward):
    from transformers import AutoModelForSequenceClassification

    model, source = AutoModelForSequenceClassification.from_pretrained(reward), fresh(reward, "scorer")
    with torch.no_grad():
        values = [model.score(model.model(torch.tensor([p + r])).last_hidden_state)[0, :, 0] for p, r in SEQUENCES]
    wanted = [v[len(p) - 1 : -1] for v, (p, _) in zip(values, SEQUENCES)]
    assert same(group.score("critic", source, ROWS, select="before"), wanted)
    assert same(group.score("critic", source, LAST, select="at"), [v[-1:] for v in values])
    assert same(group.score("critic", source, PAIRS, select="at"), [v[-1:] for v in values[:16]])


def test_greedy_tokens_have_no_regret_and_others_have_what_they_miss(group, policies):
    from transformers import AutoModelForCausalLM

    folder = policies["tied"][0]
    model, source = AutoModelForCausalLM.from_pretrained(folder), fresh(folder)
    greedy = [(p, forward(model, p, r).argmax(-1).tolist()[:1]) for p, r in SEQUENCES]
    regrets = group.score("actor", source, Rows.of(greedy), select="before", statistic="regret")
    assert all(r.tolist() == [0.0] for _, r in regrets)
    logits = [forward(model, p, r) for p, r in SEQUENCES]
    wanted = [x.max(-1).values - x.gather(-1, torch.tensor(r)[:, None]).squeeze(-1) for x, (_, r) in zip(logits, SEQUENCES)]
    assert same([r for _, r in group.score("actor", source, ROWS, select="before", statistic="regret")], wanted)


def test_weights_held_in_one_precision_are_not_those_in_another(solo, reward):
    source = fresh(reward, "scorer")
    values = solo.score("actor", source, LAST, select="at")
    other = fresh(reward, "scorer", precision="bfloat16")
    solo.on_ranks(_rename, "actor", other.state_id)
    low = solo.score("actor", other, LAST, select="at")
    assert any(float(a[0]) != float(b[0]) for a, b in zip(values, low))


def _rename(rank, role, state_id):
    rank.rename(role, state_id)


def train_actor(group, policies, old):
    folder = policies["tied"][0]
    source = fresh(folder)
    before = group.score("actor", source, ROWS, select="before", temperature=0.7)
    advantages = [[(-1.0) ** (i + t) for t in range(len(r))] for i, (_, r) in enumerate(SEQUENCES)]
    rows = Rows.of(SEQUENCES, token_fields={"old_logprobs": old(before), "advantages": advantages})
    return group.fit(
        source, rows, ACTOR, epochs=2, options={"temperature": 0.7, "clip_low": 0.2, "clip_high": 0.2}, optimizer={"batch_size": 17}
    )


def test_before_the_first_update_every_ratio_is_one_and_the_divergence_zero(group, policies):
    made = train_actor(group, policies, lambda logprobs: logprobs)
    first = {name: value for step, name, value in made.metrics if step == 0}
    assert first["ratio_max"] == pytest.approx(1.0, abs=2e-5)
    assert abs(first["approximate_kl_k1"]) < 2e-6 and 0.0 <= first["approximate_kl_k3"] < 1e-9
    assert first["clip_fraction"] == 0.0
    assert made.metric("approximate_kl_k3")[1] > 1e-5, "and afterwards neither"


def test_with_scores_from_micro_batches_of_the_same_rows_the_ratio_is_one_to_the_bit(solo, policies):
    with solo.hardware(micro_batch_tokens=10_000):
        made = train_actor(solo, policies, lambda logprobs: logprobs)
    first = {name: value for step, name, value in made.metrics if step == 0}
    assert (first["ratio_max"], first["approximate_kl_k1"], first["approximate_kl_k3"]) == (1.0, 0.0, 0.0)
