"""Stage reward_model: Bradley-Terry on preference pairs; held-out accuracy, and the mean and spread that normalise its scores."""

from __future__ import annotations

import statistics

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe, Source
from stages.cluster.rows import Rows
from stages.encoded import conversations
from stages.errors import UserError


def run(context) -> None:
    params, cluster, base = context.params, context.cluster, context.model_folder("base")
    start = source(context, "base", "scorer", precision=params["precision"], seed=params["seed"])
    pairs = _pairs(context, "data")
    rows = _rows(pairs, _margins(context, pairs["ids"]) if params["margin"] else None)
    done = cluster.train(
        "critic",
        start,
        rows,
        Recipe("stages.algorithms.objectives.pairs:BradleyTerry", params["optimizer"], params["epochs"], params["seed"],
               **context.hints, state=str(context.state)),
        "training",
        folder=context.out / "model",
        tokenizer_from=base,
    )  # fmt: skip
    heldout = _pairs(context, "heldout")
    made = Source(f"made:{context.key}", str(context.out / "model"), "scorer", params["precision"])
    with context.phase("logits and rewards"):
        scores = [float(s[0]) for s in cluster.score("reward", made, _rows(heldout), select="at")]
    chosen, rejected = scores[0::2], scores[1::2]
    right = sum((c > r) + 0.5 * (c == r) for c, r in zip(chosen, rejected))
    context.facts |= {
        "rows": len(rows),
        "drops": {"data": pairs["drops"], "heldout": heldout["drops"]},
        "accuracy": right / len(chosen),
        "calibration_error": cluster.apply("stages.reward_model:calibration", chosen=chosen, rejected=rejected),
        "mean": statistics.fmean(scores),
        "std": statistics.stdev(scores),
        "count": len(scores),
    }
    context.log(f"right on {right / len(chosen):.1%} of {len(chosen)} held-out pairs")
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("reward_model", done["metrics"]))
    arrow.write(
        context.out / "heldout.arrow", arrow.HELDOUT,
        ({"id": i, "chosen_score": c, "rejected_score": r} for i, c, r in zip(heldout["ids"], chosen, rejected)),
    )  # fmt: skip


def _pairs(context, name: str) -> dict:
    return conversations(context, name, ("chosen", "rejected"), context.model_folder("base"))


def _rows(pairs: dict, margins: list[float] | None = None) -> Rows:
    sequences = [(p, r) for p, c, j in zip(pairs["prompts"], pairs["chosen"], pairs["rejected"]) for r in (c, j)]
    return Rows.of(sequences, per_row=2, last_only=True, row_fields={} if margins is None else {"margin": margins})


def _margins(context, ids: list[str]) -> list[float]:
    table = arrow.read(context.input("data") / "data.arrow")
    found = dict(zip(table["id"].to_pylist(), table["margin"].to_pylist()))
    missing = [i for i in ids if found[i] is None]
    if missing:
        raise UserError(
            f"models.{context.model}.margin: {len(missing)} of {len(ids)} pairs have no margin ({missing[0]}); give the column, "
            "data.<name>.columns: {margin: ...}, or take the option out"
        )
    return [found[i] for i in ids]


def calibration(*, chosen: list[float], rejected: list[float]) -> float:
    """Where torch is loaded."""
    import torch

    from stages.algorithms.reward_model import calibration_error

    return calibration_error(torch.tensor(chosen) - torch.tensor(rejected))
