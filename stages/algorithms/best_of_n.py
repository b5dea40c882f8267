"""Choosing among the samples of a prompt: the best one, or a pair of best and worst."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence


def best_of_n(prompt_ids: Sequence[Hashable], rewards: Sequence[float]) -> dict[Hashable, int]:
    """Row of the highest reward of each prompt; on a tie the first such row.

    prompt_ids, rewards: one a row; ids tell prompts apart, so two prompts of one text stay two.
    Returns {prompt id: row}, in order of first appearance. Raises ValueError when lengths differ, or naming the
    prompts with a NaN reward. Nakano et al. 2021 (rejection sampling).
    """
    return {prompt: max(rows, key=lambda row: rewards[row]) for prompt, rows in _groups(prompt_ids, rewards).items()}


def pair_best_worst(prompt_ids: Sequence[Hashable], rewards: Sequence[float]) -> dict[Hashable, tuple[int, int]]:
    """Rows of the highest and the lowest reward of each prompt; on a tie the first such row.

    Returns {prompt id: (best row, worst row)}; a prompt whose rewards are all equal has no pair and is left out.
    Raises ValueError as best_of_n does.
    """
    best = best_of_n(prompt_ids, rewards)
    worst = {prompt: min(rows, key=lambda row: rewards[row]) for prompt, rows in _groups(prompt_ids, rewards).items()}
    return {prompt: (best[prompt], worst[prompt]) for prompt in best if rewards[best[prompt]] > rewards[worst[prompt]]}


def top_share(rewards: Sequence[float], share: float) -> list[int]:
    """Rows of the highest rewards, ceil(share * n) of them, best first; on a tie the lower row.

    Raises ValueError unless 0 < share <= 1, or when a reward is NaN. Dong et al. 2023 (RAFT), the top 1/k of a batch.
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must lie in (0, 1], not {share}")
    if any(math.isnan(reward) for reward in rewards):
        raise ValueError(f"NaN reward in rows {[row for row, reward in enumerate(rewards) if math.isnan(reward)]}")
    order = sorted(range(len(rewards)), key=lambda row: (-rewards[row], row))
    return order[: math.ceil(share * len(rewards))]


def _groups(prompt_ids: Sequence[Hashable], rewards: Sequence[float]) -> dict[Hashable, list[int]]:
    if len(prompt_ids) != len(rewards):
        raise ValueError(f"{len(prompt_ids)} prompt ids for {len(rewards)} rewards")
    failed = {prompt: None for prompt, reward in zip(prompt_ids, rewards, strict=True) if math.isnan(reward)}
    if failed:
        raise ValueError(f"NaN reward for prompts {list(failed)}")
    groups: dict[Hashable, list[int]] = {}
    for row, prompt in enumerate(prompt_ids):
        groups.setdefault(prompt, []).append(row)
    return groups
