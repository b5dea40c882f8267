"""Stage dpo: direct preference optimisation (DPO, cDPO, robust DPO, IPO) on pairs, against stored reference log-probabilities."""

from __future__ import annotations

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows
from stages.rated import load, reference


def run(context) -> None:
    params, cluster, base = context.params, context.cluster, context.model_folder("base")
    rated, logprob = load(context, base), reference(context)
    rows = Rows.of(
        [(prompt, response) for _, _, prompt, response, _ in rated.rows],
        per_row=2,
        row_fields={
            f"reference_{name}": [logprob[id_, name] for id_, other, _, _, _ in rated.rows if other == name]
            for name in ("chosen", "rejected")
        },
    )
    done = cluster.train(
        "actor",
        source(context, "base", "causal", precision=params["precision"]),
        rows,
        Recipe("stages.algorithms.objectives.preference:Preference", params["optimizer"], params["epochs"], params["seed"],
               {k: params[k] for k in ("loss", "beta", "label_smoothing", "robust", "average_logprobs")},
               **context.hints, state=str(context.state)),
        "training",
        folder=context.out / "model",
        tokenizer_from=base,
    )  # fmt: skip
    context.facts |= {"rows": len(rows), "drops": rated.drops}
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("dpo", done["metrics"]))
