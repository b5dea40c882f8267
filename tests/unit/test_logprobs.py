"""Log-probabilities, nucleus and importance weights."""

import math

import pytest
import torch

from stages.algorithms.logprobs import entropy, token_logprobs, top_p_logprobs, truncated_importance

LOGITS = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [-0.407606, -1.407606, -2.407606]), (0.5, [-0.142932, -2.142932, -4.142932])],
)
def test_temperature_divides_logits_not_log_probabilities(temperature, expected):
    got = token_logprobs(LOGITS.expand(3, 3), torch.arange(3), temperature=temperature)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = token_logprobs(logits, torch.arange(4))
    assert got.dtype == torch.float32
    assert torch.allclose(got, logits.float().log_softmax(-1)[torch.arange(4), torch.arange(4)], atol=1e-5)


def test_a_temperature_of_zero_is_an_error():
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(LOGITS[None], torch.tensor([0]), temperature=0.0)


def test_targets_must_match_the_logits():
    with pytest.raises(ValueError, match="shapes"):
        token_logprobs(LOGITS[None], torch.tensor([0, 1]))


def test_entropy_of_uniform_logits_and_at_a_temperature():
    assert entropy(torch.zeros(2, 8)).tolist() == pytest.approx([math.log(8)] * 2, abs=1e-6)
    expected = -(LOGITS / 0.5).softmax(0) @ (LOGITS / 0.5).log_softmax(0)
    assert entropy(LOGITS[None], temperature=0.5).item() == pytest.approx(expected.item())


def test_a_forbidden_token_adds_neither_entropy_nor_nan_gradient():
    logits = torch.tensor([[0.0, 0.0, -INF]], requires_grad=True)
    got = entropy(logits)
    got.sum().backward()
    assert got.item() == pytest.approx(math.log(2)) and logits.grad.isfinite().all()


def test_top_p_renormalises_and_tells_the_offset():
    logprobs, offset = top_p_logprobs(LOGITS[None], top_p=0.9)
    assert logprobs[0].tolist() == pytest.approx([-0.313262, -1.313262, -INF], abs=1e-6)
    assert offset.item() == pytest.approx(0.094344, abs=1e-6)
    assert (logprobs[0, :2] - offset).tolist() == pytest.approx([-0.407606, -1.407606], abs=1e-6)


def test_top_p_keeps_one_token_at_least_and_all_at_one():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert top_p_logprobs(logits, top_p=1e-9)[0].tolist() == [[-INF, 0.0, -INF]]
    assert torch.allclose(top_p_logprobs(logits, top_p=1.0)[0], logits.log_softmax(-1), atol=1e-6)


@pytest.mark.parametrize("top_p", [0.0, 1.1])
def test_top_p_must_be_a_share(top_p):
    with pytest.raises(ValueError, match="top_p"):
        top_p_logprobs(LOGITS[None], top_p=top_p)


def importance(log_ratio, kind, mask=None):
    x = torch.tensor([log_ratio], dtype=torch.float64)
    mask = torch.ones_like(x, dtype=torch.bool) if mask is None else torch.tensor([mask])
    return truncated_importance(x, mask, low=0.5, high=5.0, kind=kind)[0].tolist()


@pytest.mark.parametrize(("kind", "weights"), [("tis", [2.225541, 1, 0.5, 5]), ("icepop", [2.225541, 1, 0, 0])])
def test_truncated_importance(kind, weights):
    assert importance([0.8, 0, -2, 2], kind) == pytest.approx(weights, abs=1e-6)


def test_a_sequence_is_kept_or_dropped_by_its_geometric_mean():
    kept = importance([0.8, 0, -2, 2], "sequence")
    assert kept == pytest.approx([2.225541, 1, math.exp(-2), math.exp(2)], abs=1e-6)
    assert math.prod(kept) ** 0.25 == pytest.approx(1.221403, abs=1e-6)
    assert importance([2.0, 2.0], "sequence") == [0, 0]


@pytest.mark.parametrize("kind", ["tis", "icepop", "sequence"])
def test_masked_slots_get_no_weight_and_do_not_move_the_sequence(kind):
    assert importance([0.0, NAN, INF], kind, [True, False, False]) == [1, 0, 0]


def test_importance_weights_carry_no_gradient():
    x = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not truncated_importance(x, mask, low=0.5, high=5.0, kind="tis").requires_grad


def test_importance_refuses_an_empty_range_and_an_unknown_kind():
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="range"):
        truncated_importance(x, mask, low=5.0, high=0.5, kind="tis")
    with pytest.raises(ValueError, match="unknown"):
        importance([0.0], "tisk")
