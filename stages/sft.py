"""Stage sft: supervised fine-tuning on demonstrations; response tokens are trained, the end of text among them."""

from __future__ import annotations

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows
from stages.encoded import conversations


def run(context) -> None:
    params, cluster, base = context.params, context.cluster, context.model_folder("base")
    chat = conversations(context, "data", ("response",), base)
    rows = Rows.of(list(zip(chat["prompts"], chat["response"])))
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
    context.facts |= {"rows": len(rows), "drops": chat["drops"], "trained_tokens": int(rows.chosen_T.sum())}
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("sft", done["metrics"]))
