"""Stage selection: samples scored by the reward model; the best of each prompt, or the best paired with the worst."""

from __future__ import annotations

from stages import arrow, manifest, plan, rewards
from stages.algorithms.best_of_n import best_of_n, pair_best_worst, top_share
from stages.errors import UserError


def run(context) -> None:
    params, keep = context.params, context.params["keep"]
    rollouts = arrow.read(context.input("rollouts") / "rollouts.arrow").to_pylist()
    with context.phase("logits and rewards"):
        by_source = rewards.score(context, rollouts, _policy(context), params["precision"])
    scores = rewards.combined(context, by_source, "model" if len(by_source) > 1 else "none")
    ended = [i for i, r in enumerate(rollouts) if r["finish_reason"] == "stop"]
    ids, ended_scores = [rollouts[i]["prompt_id"] for i in ended], [scores[i] for i in ended]
    used: dict[int, str] = {}
    if keep == "best":
        share = params["top_share"]
        best = top_share(ended_scores, share) if share is not None else best_of_n(ids, ended_scores).values()
        chosen = _without_repeats(rollouts, [ended[i] for i in best])
        rows = [_best(rollouts[i], scores[i]) for i in chosen]
        used = dict.fromkeys(chosen, "best")
        schema = arrow.BEST
    else:
        pairs = {p: (ended[b], ended[w]) for p, (b, w) in pair_best_worst(ids, ended_scores).items()}
        pairs = {p: (b, w) for p, (b, w) in pairs.items() if rollouts[b]["response_ids"] != rollouts[w]["response_ids"]}
        rows = [_pair(rollouts[b], rollouts[w], scores[b], scores[w]) for b, w in pairs.values()]
        used = {i: name for b, w in pairs.values() for i, name in ((b, "chosen"), (w, "rejected"))}
        schema = arrow.PAIRS
    if not rows:
        raise UserError(
            f"{context.model}: no prompt has {'a finished response' if keep == 'best' else 'two finished responses that differ'}"
        )
    context.facts |= {
        "rows": len(rollouts), "kept": len(rows), "truncated": len(rollouts) - len(ended),
        "mean_score": sum(scores) / len(scores), "mean_kept_score": sum(scores[i] for i, n in used.items() if n != "rejected") / len(rows),
    }  # fmt: skip
    arrow.write(context.out / "data.arrow", schema, rows)
    arrow.write(
        context.out / "scores.arrow", arrow.SCORES,
        ({"prompt_id": r["prompt_id"], "sample": r["sample"], "score": scores[i], "used": used.get(i, "")} for i, r in enumerate(rollouts)),
    )  # fmt: skip


def _policy(context):
    """The model folder that the rollouts were sampled from."""
    return context.root / plan.model_folder(manifest.read(context.input("rollouts"))["inputs"]["policy"]["path"])


def _without_repeats(rollouts, chosen: list[int]) -> list[int]:
    """The same answer to the same prompt text teaches nothing twice."""
    seen: set = set()
    kept = []
    for i in chosen:
        content = (tuple(rollouts[i]["prompt_ids"]), tuple(rollouts[i]["response_ids"]))
        if content not in seen:
            seen.add(content)
            kept.append(i)
    return kept


def _best(r: dict, score: float) -> dict:
    return {"id": f"{r['prompt_id']}/{r['sample']}", "prompt": r["prompt"], "response": r["text"], "prompt_ids": r["prompt_ids"],
            "response_ids": r["response_ids"], "score": score}  # fmt: skip


def _pair(b: dict, w: dict, best: float, worst: float) -> dict:
    return {"id": b["prompt_id"], "prompt": b["prompt"], "chosen": b["text"], "rejected": w["text"], "prompt_ids": b["prompt_ids"],
            "chosen_ids": b["response_ids"], "rejected_ids": w["response_ids"], "chosen_score": best, "rejected_score": worst}  # fmt: skip
