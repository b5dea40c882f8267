"""Stage rollouts: the policy answers an iteration's prompts on the engines; token ids, log-probabilities and seeds are kept."""

from __future__ import annotations

import hashlib
import json

from stages import arrow, manifest
from stages.algorithms.planner import epoch_order
from stages.cluster import saved_state
from stages.errors import UserError

_PROBES = 4
_PROBE_TOKENS = 8


def run(context) -> None:
    params, cluster = context.params, context.cluster
    folder, sampling = context.model_folder("policy"), params["sampling"]
    table = arrow.read(context.input("prompts") / "data.arrow")
    chosen = table.take(window(len(table), params["prompts_per_iteration"], params["iteration"], params["seed"])).to_pylist()
    ids = cluster.apply(
        "stages.tokens:prompts", folder=str(folder), asked=[r["turns"] or r["prompt"] for r in chosen], ids=[r["id"] for r in chosen],
        room=sampling["max_tokens"], limit=context.runtime["hardware"]["engines"]["max_model_len"],
    )  # fmt: skip
    stop = [cluster.apply("stages.tokens:special", folder=str(folder))["eos"]]
    state_id, precision = context.state_id("policy"), params["precision"]
    asked = [(row, tokens, sample) for row, tokens in zip(chosen, ids) for sample in range(params["samples_per_prompt"])]
    seeds = [sample_seed(params["seed"], params["iteration"], row["id"], sample) for row, _, sample in asked]

    kept, begun = context.state / "finished.jsonl", saved_state.reached(str(context.state))
    finished = {i: tuple(r) for line in _whole_lines(kept) for i, r in json.loads(line)}
    if begun is not None:
        context.resumed("generation", len(finished), begun - len(finished), "responses")

    def keep(new: dict[int, tuple]) -> None:
        with kept.open("a") as file:
            file.write(json.dumps(sorted(new.items())) + "\n")

    made = cluster.generate(
        state_id, folder, precision, [t for _, t, _ in asked], seeds, temperature=sampling["temperature"],
        max_tokens=sampling["max_tokens"], stop=stop, phase="generation", finished=finished, keep=keep,
        asking=lambda n: saved_state.mark(str(context.state), n),
        greedy=ids[:_PROBES], greedy_tokens=min(_PROBE_TOKENS, sampling["max_tokens"]),
    )  # fmt: skip
    results, probes = made[: len(asked)], made[len(asked) :]
    policy = manifest.read(context.input("policy"))["content"][:16]
    texts = cluster.apply("stages.tokens:texts", folder=str(folder), responses=[r[0] for r in results])
    context.facts |= {
        "rows": len(results),
        "greedy_probe": [{"prompt_ids": p, "response_ids": r[0]} for p, r in zip(ids, probes)],
    }
    arrow.write(
        context.out / "rollouts.arrow", arrow.ROLLOUTS,
        (
            {
                "iteration": params["iteration"], "prompt_id": row["id"], "sample": sample, "policy": policy,
                "prompt": row["prompt"], "turns": row["turns"], "reference": row["reference"], "prompt_ids": tokens,
                "response_ids": made, "logprobs": logprobs, "finish_reason": reason,
                "temperature": sampling["temperature"], "seed": seed, "text": text,
            }
            for (row, tokens, sample), (made, logprobs, reason), seed, text in zip(asked, results, seeds, texts, strict=True)
        ),
    )  # fmt: skip


def window(total: int, size: int, iteration: int, seed: int) -> list[int]:
    """Indexes of an iteration's prompts: consecutive windows over reshuffled passes, none of which goes over a pass's end, so
    that no prompt is in one twice. What is left at a pass's end waits for another shuffle."""
    if size > total:
        raise UserError(f"prompts_per_iteration: {size}, but the data set has only {total} prompts")
    epoch, window = divmod(iteration - 1, total // size)
    return epoch_order(total, seed=seed, epoch=epoch)[window * size : (window + 1) * size]


def sample_seed(seed: int, iteration: int, prompt_id: str, sample: int) -> int:
    """A seed of 62 bits that depends on nothing but what is sampled."""
    digest = hashlib.sha256(f"{seed}/{iteration}/{prompt_id}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def _whole_lines(path) -> list[str]:
    """The lines of a file; half a line that a killed run left at its end is cut off, so that more can be added."""
    if not path.exists():
        return []
    whole, newline, half = path.read_text().rpartition("\n")
    if half:
        manifest.write_text(path, whole + newline)
    return whole.split("\n") if whole else []
