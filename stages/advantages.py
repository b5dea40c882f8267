"""Scores to rewards, advantages and returns over a whole rollout (runs where torch is loaded)."""

from __future__ import annotations

from typing import Any

import torch

from stages.algorithms.baselines import group_advantages, has_signal
from stages.algorithms.gae import discounted_returns, gae
from stages.algorithms.kl import kl_estimate
from stages.algorithms.logprobs import truncated_importance
from stages.algorithms.masked import length_mask, masked_mean, whiten
from stages.algorithms.shaped_rewards import shaped_rewards


def compute(*, scores: list[float], finished: list[bool], groups: list[str], logprobs, reference, values, kl_coef: float,
            options: dict[str, Any]) -> dict:  # fmt: skip
    """Scores at the last token, less the per-token KL; advantages by the estimator; whitening over the whole rollout.

    scores: normalised. logprobs, reference, values: one float32 array per response; values is None without a critic.
    groups: the prompt of each response. Returns arrays of the same lengths under `rewards`, `advantages`, `returns`;
    `used`: False for responses that dynamic filtering leaves out; and `means` to watch.
    """
    counts = torch.tensor([len(v) for v in logprobs])
    mask_BL = length_mask(counts, width=int(counts.max()))
    logprobs_BL, reference_BL = _padded(logprobs, mask_BL), _padded(reference, mask_BL)
    truncated_B = ~torch.tensor(finished)
    given_B = torch.tensor(scores, dtype=torch.float32)
    score_B = given_B.clamp(-options["reward_clip"], options["reward_clip"]) - options["truncation_penalty"] * truncated_B
    rewards_BL, _ = shaped_rewards(score_B, logprobs_BL, reference_BL, mask_BL, kl_coef=kl_coef, kl_kind=options["kl_estimator"])
    if options["estimator"] == "gae":
        advantages_BL, returns_BL = gae(rewards_BL, _padded(values, mask_BL), mask_BL, gamma=options["gamma"], lam=options["lam"])
    elif options["estimator"] == "reinforce_pp":
        advantages_BL = returns_BL = discounted_returns(rewards_BL, mask_BL, gamma=options["gamma"])
    else:
        returns_B = rewards_BL.sum(dim=1)
        advantages_BL = _without_critic(returns_B, groups, options["estimator"])[:, None] * mask_BL
        returns_BL = returns_B[:, None] * mask_BL
    signal_B = _signal(score_B, groups)
    used_B = signal_B if options["filter_groups"] else torch.ones_like(signal_B)
    used_BL = mask_BL & used_B[:, None]
    raw = advantages_BL[used_BL]
    if (options["whiten_advantages"] or options["estimator"] == "reinforce_pp") and len(raw):
        advantages_BL = whiten(advantages_BL, used_BL)
    kl_BL = kl_estimate(logprobs_BL, reference_BL, "k1").masked_fill(~mask_BL, 0.0)
    split = lambda x_BL: [row.numpy() for row in x_BL[mask_BL].split(counts.tolist())]
    means = {
        "score": float(given_B.mean()), "score_std": _spread(given_B), "shaped_score": float(score_B.mean()),
        "kl": float(kl_BL.sum(dim=1).mean()), "kl_coef": kl_coef,
        "response_length": float(counts.double().mean()), "ended_by_itself": 1.0 - float(truncated_B.double().mean()),
        "advantage_mean": float(raw.mean()) if len(raw) else 0.0, "advantage_std": _spread(raw),
        "filtered": 1.0 - float(used_B.double().mean()),
    }  # fmt: skip
    if len(set(groups)) < len(groups):
        means["groups_without_signal"] = 1.0 - float(signal_B.double().mean())
    if values is not None:
        values_BL = _padded(values, mask_BL)
        means["value"] = float(masked_mean(values_BL, mask_BL))
        returns, residuals = returns_BL[mask_BL].double(), (returns_BL - values_BL)[mask_BL].double()
        means["explained_variance"] = float(1.0 - residuals.var() / returns.var()) if len(returns) > 1 and returns.var() > 0 else 0.0
    return {
        "rewards": split(rewards_BL), "advantages": split(advantages_BL.masked_fill(~used_BL, 0.0)), "returns": split(returns_BL),
        "used": used_B.tolist(), "means": means,
    }  # fmt: skip


def engine_weights(*, trainer, engine, kind: str, low: float, high: float) -> list:
    """Importance weights of sampled tokens, an array per response: trainer's over engine's probability, limited."""
    counts = torch.tensor([len(v) for v in trainer])
    mask_BL = length_mask(counts, width=int(counts.max()))
    weights_BL = truncated_importance(_padded(trainer, mask_BL) - _padded(engine, mask_BL), mask_BL, low=low, high=high, kind=kind)
    return [row.numpy() for row in weights_BL[mask_BL].split(counts.tolist())]


def _members(groups: list[str]) -> list[list[int]]:
    found: dict[str, list[int]] = {}
    for i, name in enumerate(groups):
        found.setdefault(name, []).append(i)
    return [found[name] for name in sorted(found)]


def _signal(score_B, groups: list[str]):
    """signal_B: whether a response's prompt has samples of different scores; True where it has one sample."""
    members = _members(groups)
    if len(members[0]) < 2:
        return torch.ones(len(groups), dtype=torch.bool)
    index_GN = torch.tensor(members)
    signal_B = torch.zeros(len(groups), dtype=torch.bool)
    signal_B[index_GN.flatten()] = has_signal(score_B[index_GN]).repeat_interleave(index_GN.shape[1])
    return signal_B


def _without_critic(returns_B, groups: list[str], estimator: str):
    """Returns of whole responses, less the mean of the iteration (reinforce) or what their own prompt's samples say."""
    if estimator == "reinforce":
        return returns_B - returns_B.mean()
    index_GN = torch.tensor(_members(groups))
    advantages_B = torch.zeros_like(returns_B)
    advantages_B[index_GN.flatten()] = group_advantages(returns_B[index_GN], kind=estimator).flatten()
    return advantages_B


def _spread(x) -> float:
    return float(x.std()) if len(x) > 1 else 0.0


def _padded(rows, mask_BL):
    flat = torch.cat([torch.as_tensor(row, dtype=torch.float32).clone() for row in rows])
    return torch.zeros(mask_BL.shape).masked_scatter(mask_BL, flat)
