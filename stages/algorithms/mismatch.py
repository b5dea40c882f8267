"""Pairs of a prompt with a response to another one: where KTO takes its reference point."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def mismatched_rows(prompt_ids: Sequence[Hashable]) -> list[int]:
    """For each row the next row, cyclically, of another prompt: its response is the mismatched one of kto_kl.

    Raises ValueError when all rows have one prompt, as each would then meet itself.
    """
    n = len(prompt_ids)
    if n and len(set(prompt_ids)) == 1:
        raise ValueError(f"KTO needs two different prompts for its KL estimate; all {n} rows have {prompt_ids[0]!r}")
    partner, partners = 0, [0] * n
    for row in range(2 * n - 1, -1, -1):  # twice around: partner = first row after `row` where the prompt changes
        if prompt_ids[row % n] != prompt_ids[(row + 1) % n]:
            partner = (row + 1) % n
        partners[row % n] = partner
    return partners
