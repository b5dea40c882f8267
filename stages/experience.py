"""Stage experience: rollouts scored once by reward model, reference, actor and critic, and turned into advantages."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from stages import arrow, manifest, rewards
from stages.algorithms.kl import AdaptiveKL
from stages.algorithms.running import Running
from stages.cluster.groups import source
from stages.cluster.rows import Rows
from stages.errors import UserError

_OPTIONS = ("estimator", "filter_groups", "kl_estimator", "reward_clip", "truncation_penalty", "gamma", "lam", "whiten_advantages")
_ENGINE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest accepted gap between the engine's and the trainer's log-probability of a sampled token."""


def run(context) -> None:
    params, cluster = context.params, context.cluster
    precision, temperature = params["precision"], params["sampling"]["temperature"]
    rollouts = arrow.read(context.input("rollouts") / "rollouts.arrow").to_pylist()
    rows = Rows.of([(r["prompt_ids"], r["response_ids"]) for r in rollouts])
    probes = manifest.read(context.input("rollouts"))["facts"]["greedy_probe"]
    actor = source(context, "actor", "causal", precision=precision)
    with context.phase("logits and rewards"):
        both = Rows.of([(r["prompt_ids"], r["response_ids"]) for r in (*rollouts, *probes)])
        found = cluster.score("actor", actor, both, select="before", temperature=temperature, statistic="regret")
        trainer = [logprobs for logprobs, _ in found[: len(rollouts)]]
        _prove_engine(context, rollouts, trainer, [regret for _, regret in found[len(rollouts) :]], precision)
        reference = cluster.score(
            "reference", source(context, "reference", "causal", precision=precision), rows, select="before", temperature=temperature
        )
        values = None
        if params["estimator"] == "gae":
            own = "critic" if params["iteration"] > 1 else "actor"  # before the first update: a reward model, or the policy
            critic = source(context, "critic", "scorer", role=own, precision=precision)
            _check_critic(context, Path(critic.folder))
            values = cluster.score("critic", critic, rows, select="before")
        by_source = rewards.score(context, rollouts, context.model_folder("actor"), precision)
    last = manifest.read(context.input("last"))["facts"] if "last" in context.job["inputs"] else {}
    scores = rewards.combined(context, by_source, params["reward_normalisation"])
    if params["reward_normalisation"] == "running":
        running = Running(**last.get("running", {})).joined(scores)
        scores = [(s - running.mean) / running.std for s in scores]
        context.facts["running"] = asdict(running)
    kl_coef = params["kl_coef"]
    if params["kl_target"] is not None and last:
        controller = AdaptiveKL(last["means"]["kl_coef"], params["kl_target"], params["kl_horizon"])
        kl_coef = controller.updated(last["means"]["kl"], last["rows"]).coefficient
    with context.phase("advantages"):
        made = cluster.apply(
            "stages.advantages:compute", scores=scores, finished=[r["finish_reason"] == "stop" for r in rollouts],
            logprobs=trainer, reference=reference, values=values, groups=[r["prompt_id"] for r in rollouts], kl_coef=kl_coef,
            options={k: v for k, v in params.items() if k in _OPTIONS},
        )  # fmt: skip
    if not any(made["used"]):
        raise UserError(
            f"{context.model}: no prompt of iteration {params['iteration']} has samples of different rewards, and filter_groups leaves "
            "them all out; take more samples_per_prompt, or another reward"
        )
    means = made["means"] | {"engine_gap": context.facts["engine_gap"]} | _per_source(by_source)
    context.facts |= {"rows": len(rollouts), "used": sum(made["used"]), "means": means}
    arrow.write(
        context.out / "metrics.arrow", arrow.METRICS,
        arrow.metric_rows("experience", [(params["iteration"], name, value) for name, value in means.items()]),
    )  # fmt: skip
    context.progress("experience", len(rollouts), len(rollouts), unit="response", score=means["score"], kl=means["kl"])
    arrow.write(
        context.out / "experience.arrow", arrow.EXPERIENCE,
        (
            {
                **r, "trainer_logprobs": trainer[i], "reference_logprobs": reference[i],
                "values": values[i] if values else None, "scores": [(name, of[i]) for name, of in by_source.items()], "score": scores[i],
                "shaped_rewards": made["rewards"][i], "advantages": made["advantages"][i], "returns": made["returns"][i],
                "used": made["used"][i],
            }
            for i, r in enumerate(rollouts)
        ),
    )  # fmt: skip


def _check_critic(context, folder: Path) -> None:
    """The critic reads the policy's tokens, so it must know them."""
    policy = context.model_folder("actor")
    if context.params["iteration"] == 1 and not context.cluster.apply("stages.tokens:same", one=str(folder), other=str(policy)):
        raise UserError(
            f"models.{context.model}.critic_init: the reward model has another tokenizer than the policy, whose tokens the critic must "
            "read; choose critic_init: policy"
        )


def _per_source(by_source: dict[str, list[float]]) -> dict[str, float]:
    import statistics

    found = {}
    for name, scores in by_source.items():
        found |= {
            f"reward {name} mean": statistics.fmean(scores),
            f"reward {name} std": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        }
    return found


def _prove_engine(context, rollouts, trainer, regrets, precision) -> None:
    """The engine sampled from these very weights: its greedy tokens are the trainer's, and its log-probabilities agree."""
    import numpy as np

    gaps = np.concatenate([np.abs(np.asarray(r["logprobs"], dtype=np.float32) - t) for r, t in zip(rollouts, trainer)])
    gap = float(gaps.max() if precision == "float32" else np.quantile(gaps, 0.999))  # bfloat16 has outliers among millions
    regret = max(float(r.max()) for r in regrets)
    limit = _ENGINE_TOLERANCE[precision]
    if gap > limit or regret > limit:
        raise RuntimeError(
            f"the engine did not sample from {context.job['inputs']['actor']}: its log-probabilities differ by {gap:.2g}, "
            f"its greedy tokens lie {regret:.2g} below the best (limit {limit:.2g})"
        )
    context.facts |= {"engine_gap": gap, "greedy_regret": regret}
