"""Stage experience: rollouts scored once by reward model, reference, actor and critic, and turned into advantages."""

from __future__ import annotations

from stages import arrow, manifest
from stages.cluster.groups import source
from stages.cluster.rows import Rows

_OPTIONS = ("estimator", "kl_coef", "kl_estimator", "reward_clip", "truncation_penalty", "gamma", "lam", "whiten_advantages")
_ENGINE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest accepted gap between the engine's and the trainer's log-probability of a sampled token."""


def run(context) -> None:
    params, cluster = context.params, context.cluster
    precision, temperature = params["precision"], params["sampling"]["temperature"]
    rollouts = arrow.read(context.input("rollouts") / "rollouts.arrow").to_pylist()
    sequences = [(r["prompt_ids"], r["response_ids"]) for r in rollouts]
    rows, whole = Rows.of(sequences), Rows.of(sequences, last_only=True)
    actor = source(context, "actor", "causal", precision=precision)
    with context.phase("logits and rewards"):
        trainer = cluster.score("actor", actor, rows, select="before", temperature=temperature)
        _prove_engine(context, cluster, actor, rollouts, trainer, precision)
        reference = cluster.score(
            "reference", source(context, "reference", "causal", precision=precision), rows, select="before", temperature=temperature
        )
        values = None
        if params["estimator"] == "gae":
            values = cluster.score("critic", source(context, "critic", "scorer", role="critic", precision=precision), rows, select="before")
        scores = [
            float(s[0]) for s in cluster.score("reward", source(context, "reward", "scorer", precision=precision), whole, select="at")
        ]
    norm = manifest.read(context.input("reward"))["facts"]
    with context.phase("advantages"):
        made = cluster.apply(
            "stages.advantages:compute", scores=scores, finished=[r["finish_reason"] == "stop" for r in rollouts],
            logprobs=trainer, reference=reference, values=values, mean=norm["mean"], std=norm["std"],
            groups=[r["prompt_id"] for r in rollouts], options={k: v for k, v in params.items() if k in _OPTIONS},
        )  # fmt: skip
    context.facts |= {"rows": len(rollouts), "means": made["means"]}
    arrow.write(
        context.out / "experience.arrow", arrow.EXPERIENCE,
        (
            {
                **r, "trainer_logprobs": trainer[i], "reference_logprobs": reference[i],
                "values": values[i] if values else None, "score": scores[i],
                "shaped_rewards": made["rewards"][i], "advantages": made["advantages"][i], "returns": made["returns"][i],
            }
            for i, r in enumerate(rollouts)
        ),
    )  # fmt: skip


def _prove_engine(context, cluster, actor, rollouts, trainer, precision) -> None:
    """The engine sampled from these very weights: its greedy tokens are the trainer's, and its log-probabilities agree."""
    import numpy as np

    gap = max(float(np.abs(np.asarray(r["logprobs"], dtype=np.float32) - t).max()) for r, t in zip(rollouts, trainer))
    probes = manifest.read(context.input("rollouts"))["facts"]["greedy_probe"]
    greedy = Rows.of([(p["prompt_ids"], p["response_ids"]) for p in probes])
    regret = max(float(r.max()) for r in cluster.score("actor", actor, greedy, select="before", statistic="regret"))
    limit = _ENGINE_TOLERANCE[precision]
    if gap > limit or regret > limit:
        raise RuntimeError(
            f"the engine did not sample from {context.job['inputs']['actor']}: its log-probabilities differ by {gap:.2g}, "
            f"its greedy tokens lie {regret:.2g} below the best (limit {limit:.2g})"
        )
    context.facts |= {"engine_gap": gap, "greedy_regret": regret}
