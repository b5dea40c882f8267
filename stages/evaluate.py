"""Stage evaluate: a policy answers the evaluation prompts; gold reward, wins against the baseline, reward model, KL."""

from __future__ import annotations

import json
import math
import statistics

from stages import arrow, rewards
from stages.cluster.groups import source
from stages.cluster.rows import Rows
from stages.condition import conditioned
from stages.rollouts import sample_seed


def run(context) -> None:
    params, cluster = context.params, context.cluster
    folder, sampling, precision = context.model_folder("policy"), params["sampling"], params["precision"]
    table = arrow.read(context.input("prompts") / "data.arrow").to_pylist()
    asked = [conditioned(r, params["condition"]) if "condition" in params else r["turns"] or r["prompt"] for r in table]
    ids = cluster.apply(
        "stages.tokens:prompts", folder=str(folder), asked=asked, ids=[r["id"] for r in table], room=sampling["max_tokens"],
        limit=context.runtime["hardware"]["engines"]["max_model_len"],
    )  # fmt: skip
    stop = [cluster.apply("stages.tokens:special", folder=str(folder))["eos"]]
    seeds = [sample_seed(params["seed"], 0, r["id"], 0) for r in table]
    results = cluster.generate(
        context.state_id("policy"), folder, precision, ids, seeds, temperature=sampling["temperature"],
        max_tokens=sampling["max_tokens"], stop=stop, phase="generation",
    )  # fmt: skip
    texts = cluster.apply("stages.tokens:texts", folder=str(folder), responses=[r[0] for r in results])
    sequences = [(p, r[0]) for p, r in zip(ids, results)]
    rows = Rows.of(sequences)
    score = lambda role: cluster.score(
        role, source(context, _INPUT[role], "causal", precision=precision), rows, select="before", temperature=sampling["temperature"]
    )
    plain = ids  # the prompts as they are, without a condition that the policy was asked under
    if "condition" in params:
        plain = cluster.apply("stages.tokens:prompts", folder=str(folder), asked=[r["turns"] or r["prompt"] for r in table],
                              ids=[r["id"] for r in table], room=1)  # fmt: skip
    kl: list[float | None] = [None] * len(table)
    with context.phase("logits and rewards"):
        if cluster.apply("stages.tokens:same", one=str(folder), other=str(context.model_folder("reference"))):
            kl = [float((a.astype("float64") - b).sum()) for a, b in zip(score("actor"), score("reference"))]
        told = [{**row, "text": text, "prompt_ids": p, "response_ids": r[0], "finish_reason": r[2]}
                for row, text, p, r in zip(table, texts, plain, results)]  # fmt: skip
        by_source = rewards.score(context, told, folder, precision)
    scores = rewards.combined(context, by_source, "model" if len(by_source) > 1 else "none")
    gold = params["judge"] == "gold"
    judged = [_judge(row["prompt"], text, r[2] == "stop") if gold else (None, {}) for row, text, r in zip(table, texts, results)]
    samples = [
        {
            "prompt_id": row["id"], "prompt": row["prompt"], "text": texts[i], "response_ids": results[i][0],
            "finish_reason": results[i][2], "gold_reward": judged[i][0], "gold_terms": list(judged[i][1].items()), "score": scores[i],
            "kl": kl[i],
        }
        for i, row in enumerate(table)
    ]  # fmt: skip
    arrow.write(context.out / "samples.arrow", arrow.SAMPLES, samples)
    summary = _summary(samples, context)
    context.facts |= {"rows": len(samples), **summary}
    (context.out / "summary.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")


_INPUT = {"actor": "policy", "reference": "reference"}


def _judge(prompt: str, text: str, finished: bool) -> tuple[float, dict[str, float]]:
    """The embedded world's gold reward and its terms."""
    from dataclasses import asdict

    from stages.world.gold import gold_reward

    terms = asdict(gold_reward(prompt, text, finished=finished))
    return terms.pop("total"), terms


def _summary(samples: list[dict], context) -> dict:
    mean, gold = statistics.fmean, context.params["judge"] == "gold"
    summary = {
        "gold_reward": mean(s["gold_reward"] for s in samples) if gold else None,
        "gold_terms": {name: mean(dict(s["gold_terms"])[name] for s in samples) for name, _ in samples[0]["gold_terms"]},
        "response_length": mean(len(s["response_ids"]) for s in samples),
        "reward_model_score": mean(s["score"] for s in samples),
        "kl": mean(s["kl"] for s in samples) if samples[0]["kl"] is not None else None,
        "ended_by_itself": mean(s["finish_reason"] == "stop" for s in samples),
        "prompts": len(samples),
        "win_rate": None,
        "win_rate_se": None,
    }
    if "baseline" in context.job["inputs"]:
        by = "gold_reward" if gold else "score"
        other = {r["prompt_id"]: r[by] for r in arrow.read(context.input("baseline") / "samples.arrow").to_pylist()}
        own = {r["prompt_id"]: r[by] for r in arrow.read(context.out / "samples.arrow").to_pylist()}
        wins = [float(own[p] > other[p]) + 0.5 * float(own[p] == other[p]) for p in sorted(own)]
        summary["win_rate"] = mean(wins)
        summary["win_rate_se"] = statistics.stdev(wins) / math.sqrt(len(wins))
    return summary
