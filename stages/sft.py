"""Stage sft: supervised fine-tuning on demonstrations; response tokens are trained, the end of text among them."""

from __future__ import annotations

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.encoded import dialogues


def run(context) -> None:
    params, cluster, base = context.params, context.cluster, context.model_folder("base")
    rows, drops = dialogues(context, "data", base)
    done = cluster.train(
        "actor",
        source(context, "base", "causal", precision=params["precision"]),
        rows,
        Recipe("stages.algorithms.objectives.sft:Likelihood", params["optimizer"], params["epochs"], params["seed"],
               **context.hints, state=str(context.state)),
        "training",
        folder=context.out / "model",
        tokenizer_from=base,
    )  # fmt: skip
    context.facts |= {"rows": len(rows), "drops": drops, "trained_tokens": int(rows.chosen_T.sum())}
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("sft", done["metrics"]))
