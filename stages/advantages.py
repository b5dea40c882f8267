"""Scores to rewards, advantages and returns over a whole rollout (runs where torch is loaded)."""

from __future__ import annotations

from typing import Any

import torch

from stages.algorithms.baselines import group_advantages
from stages.algorithms.gae import gae
from stages.algorithms.kl import kl_estimate
from stages.algorithms.masked import length_mask, masked_mean, whiten
from stages.algorithms.shaped_rewards import shaped_rewards


def compute(
    *,
    scores: list[float],
    finished: list[bool],
    groups: list[str],
    logprobs,
    reference,
    values,
    mean: float,
    std: float,
    options: dict[str, Any],
) -> dict:
    """Normalised scores at the last token, less the per-token KL; advantages by the estimator; whitening over the rollout.

    logprobs, reference, values: one float32 array per response; values is None without a critic. groups: the prompt of
    each response. Returns arrays of the same lengths under `rewards`, `advantages`, `returns`, and `means` to watch.
    """
    counts = torch.tensor([len(v) for v in logprobs])
    mask_BL = length_mask(counts, width=int(counts.max()))
    logprobs_BL, reference_BL = _padded(logprobs, mask_BL), _padded(reference, mask_BL)
    score_B = (torch.tensor(scores) - mean) / std
    truncated_B = ~torch.tensor(finished)
    score_B = score_B.clamp(-options["reward_clip"], options["reward_clip"]) - options["truncation_penalty"] * truncated_B
    rewards_BL, _ = shaped_rewards(score_B, logprobs_BL, reference_BL, mask_BL, kl_coef=options["kl_coef"], kl_kind=options["kl_estimator"])
    if options["estimator"] == "gae":
        advantages_BL, returns_BL = gae(rewards_BL, _padded(values, mask_BL), mask_BL, gamma=options["gamma"], lam=options["lam"])
    else:
        returns_B = rewards_BL.sum(dim=1)
        advantages_BL = _without_critic(returns_B, groups, options["estimator"])[:, None] * mask_BL
        returns_BL = returns_B[:, None] * mask_BL
    raw = advantages_BL[mask_BL]
    if options["whiten_advantages"]:
        advantages_BL = whiten(advantages_BL, mask_BL)
    kl_BL = kl_estimate(logprobs_BL, reference_BL, "k1").masked_fill(~mask_BL, 0.0)
    split = lambda x_BL: [row.numpy() for row in x_BL[mask_BL].split(counts.tolist())]
    means = {
        "reward_model_score": float(torch.tensor(scores).mean()),
        "normalised_score": float(score_B.mean()),
        "normalised_score_std": float(score_B.std()) if len(scores) > 1 else 0.0,
        "kl": float(kl_BL.sum(dim=1).mean()),
        "response_length": float(counts.double().mean()),
        "ended_by_itself": 1.0 - float(truncated_B.double().mean()),
        "advantage_mean": float(raw.mean()),
        "advantage_std": float(raw.std()),
    }
    if values is not None:
        means["value"] = float(masked_mean(_padded(values, mask_BL), mask_BL))
    return {"rewards": split(rewards_BL), "advantages": split(advantages_BL), "returns": split(returns_BL), "means": means}


def _without_critic(returns_B, groups: list[str], estimator: str):
    """Returns of whole responses, less the mean of the iteration (reinforce) or what their own prompt's samples say."""
    if estimator == "reinforce":
        return returns_B - returns_B.mean()
    names = sorted(set(groups))
    place = {name: g for g, name in enumerate(names)}
    members: list[list[int]] = [[] for _ in names]
    for i, name in enumerate(groups):
        members[place[name]].append(i)
    index_GN = torch.tensor(members)
    advantages_B = torch.zeros_like(returns_B)
    advantages_B[index_GN.flatten()] = group_advantages(returns_B[index_GN], kind=estimator).flatten()
    return advantages_B


def _padded(rows, mask_BL):
    flat = torch.cat([torch.from_numpy(row.copy()) for row in rows])
    return torch.zeros(mask_BL.shape).masked_scatter(mask_BL, flat)
