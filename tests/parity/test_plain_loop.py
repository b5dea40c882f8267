"""A loop in plain PyTorch, row by row, with nothing of the trainer in it, ends at the same parameters."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from stages.algorithms.planner import epoch_order
from stages.cluster.rows import Rows

from .stack import BRADLEY_TERRY, LIKELIHOOD, OPTIMIZER, fresh, gap, sequences

SINGLE, PAIRS = sequences(22), sequences(22)
OPTIONS = {"schedule": "linear", "floor": 0.2, "warmup": 0.25, "max_grad_norm": 0.25}


def token_loss(model, rows):
    """Mean over all response tokens of a step."""
    total = count = 0
    for prompt, response in (SINGLE[i] for i in rows):
        logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        total = total - logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).sum()
        count += len(response)
    return total / count


def pair_loss(model, rows):
    """Mean over all pairs of a step; transformers itself picks the last token."""
    score = lambda i: model(input_ids=torch.tensor([PAIRS[i][0] + PAIRS[i][1]])).logits.squeeze()
    return sum(-logsigmoid(score(2 * i) - score(2 * i + 1)) for i in rows) / len(rows)


def plain_loop(model, loss_of, count, *, batch_size, epochs, seed):
    """Parameters after AdamW, and (loss, gradient norm, learning rate) of each step."""
    o = OPTIMIZER | OPTIONS
    adamw = torch.optim.AdamW(model.parameters(), betas=o["betas"], eps=o["eps"], weight_decay=o["weight_decay"])
    order = [epoch_order(count, seed=seed, epoch=epoch) for epoch in range(epochs)]
    steps = [rows[i : i + batch_size] for rows in order for i in range(0, count, batch_size)]
    warm, seen = len(steps) // 4, []
    for number, rows in enumerate(steps):
        left = 1 - (number - warm) / (len(steps) - warm)
        rate = o["learning_rate"] * (number / warm if number < warm else 0.2 + 0.8 * left)
        for group in adamw.param_groups:
            group["lr"] = rate
        loss = loss_of(model, rows)
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o["max_grad_norm"])
        adamw.step()
        seen.append((loss.item(), norm.item(), rate))
    return {name: p.detach() for name, p in model.named_parameters()}, seen


@pytest.fixture(params=["Likelihood", "BradleyTerry"])
def both(request, tied, reward, solo):
    """What the trainer made, and the plain loop's parameters and metrics."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if request.param == "Likelihood":
        objective, kind, folder, rows, batch_size = LIKELIHOOD, "causal", tied, Rows.of(SINGLE), 6
        model, loss_of = AutoModelForCausalLM.from_pretrained(folder), token_loss
    else:
        objective, kind, folder, batch_size = BRADLEY_TERRY, "scorer", reward, 3
        rows = Rows.of(PAIRS, per_row=2, last_only=True)
        model, loss_of = AutoModelForSequenceClassification.from_pretrained(folder), pair_loss
    ours = solo.fit(fresh(folder, kind), rows, objective, epochs=2, seed=9, optimizer=OPTIONS | {"batch_size": batch_size})
    return ours, *plain_loop(model, loss_of, len(rows), batch_size=batch_size, epochs=2, seed=9)


def test_the_trainer_ends_at_the_parameters_of_a_plain_loop(both):
    ours, parameters, seen = both
    assert gap(ours.weights, parameters) < (1e-5, "")
    names = ("loss", "grad_norm", "learning_rate")
    assert list(zip(*map(ours.metric, names))) == [pytest.approx(step, rel=1e-5) for step in seen]
    assert min(norm for _, norm, _ in seen) > OPTIONS["max_grad_norm"], "clipping was at work"


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"schedule": "constant", "warmup": 0.5}, [0.0, 0.5, 1.0, 1.0]),
        ({"schedule": "linear", "warmup": 1.0}, [0.0, 1 / 3, 2 / 3, 1.0]),
        ({"schedule": "cosine", "floor": 0.5}, [1.0, 0.5 + 0.25 * (1 + 0.5**0.5), 0.75, 0.5 + 0.25 * (1 - 0.5**0.5)]),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "",
)
def test_the_learning_rate_follows_the_schedule(solo, tied, schedule, rates):
    made = solo.fit(fresh(tied), Rows.of(SINGLE), optimizer=schedule)
    assert made.metric("learning_rate") == pytest.approx([OPTIMIZER["learning_rate"] * rate for rate in rates])
    assert solo.on_ranks(lambda rank: rank.describe()["busy"]) == [""]


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("objective", "kind"), [(LIKELIHOOD, "causal"), (BRADLEY_TERRY, "scorer")])
def test_the_first_step_changes_every_tensor(reward, untied, pair, objective, kind, stage):
    from safetensors.torch import load_file

    folder, causal = (untied, True) if kind == "causal" else (reward, False)
    rows = Rows.of(sequences(6)) if causal else Rows.of(sequences(6), per_row=2, last_only=True)
    with pair.hardware(zero_stage=stage):
        after = pair.fit(fresh(folder, kind), rows, objective).weights
    before = load_file(folder / "model.safetensors")
    assert after.keys() == before.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
