"""Stage condition: demonstrations labelled with the level of their reward-model score, written into the prompt."""

from __future__ import annotations

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.rows import Rows
from stages.encoded import conversations


def run(context) -> None:
    params, folder = context.params, context.model_folder("reward")
    rows = {r["id"]: r for r in arrow.read(context.input("data") / "data.arrow").to_pylist()}
    chat = conversations(context, "data", ("response",), folder)
    whole = Rows.of(list(zip(chat["prompts"], chat["response"])), last_only=True)
    with context.phase("logits and rewards"):
        reward = source(context, "reward", "scorer", precision=params["precision"])
        scores = [float(s[0]) for s in context.cluster.score("reward", reward, whole, select="at")]
    ranked = sorted(range(len(scores)), key=lambda i: (scores[i], chat["ids"][i]))
    level = {i: 1 + rank * params["levels"] // len(ranked) for rank, i in enumerate(ranked)}
    context.facts |= {"rows": len(scores), "drops": chat["drops"]}
    arrow.write(
        context.out / "data.arrow", arrow.DATA["demonstrations"],
        (
            rows[id_] | _asking(rows[id_], params["condition"].replace("{level}", str(level[i])))
            for i, id_ in enumerate(chat["ids"])
        ),
    )  # fmt: skip


def conditioned(row: dict, condition: str) -> str | list[dict]:
    """What is asked under a condition ("{prompt} 5"): the user's last turn with it, after the turns before."""
    text = condition.replace("{prompt}", row["prompt"])
    return [*row["turns"][:-1], {"role": "user", "content": text}] if row["turns"] else text


def _asking(row: dict, condition: str) -> dict:
    made = conditioned(row, condition)
    return {"prompt": made, "turns": None} if isinstance(made, str) else {"prompt": made[-1]["content"], "turns": made}
