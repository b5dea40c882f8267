"""Stage reference: log-probabilities of a data set's responses under the frozen reference, once for every loss that reads them."""

from __future__ import annotations

from stages import arrow
from stages.algorithms.mismatch import mismatched_rows
from stages.cluster.groups import source
from stages.cluster.rows import Rows
from stages.rated import load


def run(context) -> None:
    params, folder = context.params, context.model_folder("model")
    rated = load(context, folder)
    asked = [(id_, name, prompt, response) for id_, name, prompt, response, _ in rated.rows]
    if params["mismatched"]:
        partner = mismatched_rows([r[2] for r in map(_hashable, rated.rows)])
        asked += [(id_, f"{name} mismatched", prompt, rated.rows[partner[i]][3]) for i, (id_, name, prompt, _, _) in enumerate(rated.rows)]
    with context.phase("logits and rewards"):
        model = source(context, "model", "causal", precision=params["precision"])
        found = context.cluster.score("reference", model, Rows.of([(p, r) for _, _, p, r in asked]), select="before")
    context.facts |= {"rows": len(asked), "drops": rated.drops}
    arrow.write(
        context.out / "reference.arrow", arrow.REFERENCE,
        (
            {"id": id_, "answer": name, "logprob": float(values.astype("float64").sum()), "tokens": len(values)}
            for (id_, name, _, _), values in zip(asked, found)
        ),
    )  # fmt: skip


def _hashable(row):
    id_, name, prompt, response, label = row
    return id_, name, tuple(prompt), response, label
