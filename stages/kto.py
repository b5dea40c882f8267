"""Stage kto: Kahneman-Tversky optimisation on single rated responses; the KL reference point from mismatched pairs."""

from __future__ import annotations

from stages import arrow
from stages.algorithms.mismatch import mismatched_rows
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows
from stages.errors import UserError
from stages.rated import load, reference


def run(context) -> None:
    params, cluster, base = context.params, context.cluster, context.model_folder("base")
    rated, logprob = load(context, base), reference(context)
    _check_weights(context.model, params, [row[4] for row in rated.rows])
    partner = mismatched_rows([tuple(row[2]) for row in rated.rows])
    rows = Rows.of(
        [(prompt, response) for _, _, prompt, response, _ in rated.rows],
        row_fields={
            "reference": [logprob[id_, name] for id_, name, _, _, _ in rated.rows],
            "label": [float(label) for _, _, _, _, label in rated.rows],
        },
    )
    mismatched = Rows.of(
        [(prompt, rated.rows[partner[i]][3]) for i, (_, _, prompt, _, _) in enumerate(rated.rows)],
        row_fields={"reference": [logprob[id_, f"{name} mismatched"] for id_, name, _, _, _ in rated.rows]},
    )
    done = cluster.train(
        "actor",
        source(context, "base", "causal", precision=params["precision"]),
        rows,
        Recipe("stages.algorithms.objectives.kto:KTO", params["optimizer"], params["epochs"], params["seed"],
               {k: params[k] for k in ("beta", "desirable_weight", "undesirable_weight")},
               **context.hints, state=str(context.state)),
        "training",
        companion=mismatched,
        folder=context.out / "model",
        tokenizer_from=base,
    )  # fmt: skip
    context.facts |= {"rows": len(rows), "drops": rated.drops}
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("kto", done["metrics"]))


def _check_weights(model: str, params: dict, labels: list[bool]) -> None:
    """The bounds of Ethayarajh et al. 2024, section 4.2; one-sided data have no ratio."""
    desirable, undesirable = sum(labels), len(labels) - sum(labels)
    if desirable and undesirable:
        ratio = params["desirable_weight"] * desirable / (params["undesirable_weight"] * undesirable)
        if not 0.99 <= ratio <= 4 / 3 * 1.01 and not 0.99 <= 1 / ratio <= 4 / 3 * 1.01:
            raise UserError(
                f"models.{model}: desirable_weight * {desirable} rows / (undesirable_weight * {undesirable} rows) is {ratio:.2f}, "
                "outside 3/4 to 4/3; change a weight"
            )
