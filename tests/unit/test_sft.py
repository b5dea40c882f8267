"""Which tokens supervised fine-tuning trains."""

import pytest
import torch

from stages.algorithms.logprobs import token_logprobs
from stages.algorithms.sft import response_positions, token_nll_loss

NAN = float("nan")


def test_the_first_response_token_and_eos_are_trained():
    prompt, response = [11, 12, 13], [21, 2]
    ids = prompt + response
    positions = response_positions(len(prompt), len(ids))
    assert list(positions) == [2, 3]
    assert [ids[position + 1] for position in positions] == response


def test_an_empty_response_trains_nothing():
    assert list(response_positions(3, 3)) == []


@pytest.mark.parametrize(("prompt", "length"), [(0, 3), (4, 3)])
def test_an_empty_prompt_or_a_negative_response_is_an_error(prompt, length):
    with pytest.raises(ValueError, match="prompt_length"):
        response_positions(prompt, length)


def test_token_nll_loss_counts_trained_tokens_and_nothing_else():
    logprobs = torch.tensor([[NAN, -1.0, -3.0], [NAN, NAN, NAN]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False] * 3])
    loss = token_nll_loss(logprobs, mask)
    loss.mean().backward()
    assert (loss.sum.item(), loss.count.item(), loss.mean().item()) == (4.0, 2.0, 2.0)
    assert logprobs.grad.tolist() == [[0, -0.5, -0.5], [0, 0, 0]]


def test_only_logits_before_response_tokens_get_a_gradient():
    ids = torch.tensor([11, 12, 13, 21, 2])
    logits = torch.zeros(5, 30, requires_grad=True)
    positions = torch.tensor(response_positions(3, 5))
    logprobs = token_logprobs(logits[positions], ids[positions + 1])
    token_nll_loss(logprobs[None], torch.ones(1, 2, dtype=torch.bool)).sum.backward()
    assert logits.grad.abs().sum(dim=1).gt(0).tolist() == [False, False, True, True, False]
