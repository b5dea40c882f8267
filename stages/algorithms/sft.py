"""Supervised fine-tuning: which logits are trained, and their loss (B rows, L positions)."""

from __future__ import annotations

from torch import Tensor

from stages.algorithms.loss import Loss
from stages.algorithms.masked import check_mask, fill_masked, masked_sum


def response_positions(prompt_length: int, length: int) -> range:
    """Positions whose logits predict the response tokens, the first one and the last (EOS) included.

    prompt_length, length: tokens of the prompt, and of prompt and response. Position p predicts token p + 1, so the
    logits of the last prompt token count and those of the last token do not. Empty when there is no response.
    Raises ValueError unless 1 <= prompt_length <= length: nothing predicts the first token of an empty prompt.
    """
    if not 1 <= prompt_length <= length:
        raise ValueError(f"prompt_length must lie in 1..length={length}, not {prompt_length}")
    return range(prompt_length - 1, length - 1)


def token_nll_loss(logprobs_BL: Tensor, mask_BL: Tensor) -> Loss:
    """Negative log-likelihood of the trained tokens, in nats.

    logprobs_BL: of the target tokens; masked slots may hold anything. mask_BL: bool, all False for a filler row.
    Returns a Loss counted in tokens. Raises ValueError when shapes differ. Ouyang et al. 2022, section 3.5.
    """
    check_mask(mask_BL, logprobs_BL)
    return Loss(*masked_sum(-fill_masked(logprobs_BL, mask_BL), mask_BL))
