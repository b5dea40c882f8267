"""Stage pretrain: a BPE tokenizer and a small Llama from random weights, trained on plain texts and chat-formatted answers."""

from __future__ import annotations

from stages import arrow
from stages.cluster.recipe import Recipe, Source
from stages.cluster.rows import Rows


def run(context) -> None:
    params, cluster = context.params, context.cluster
    texts = arrow.read(context.input("texts") / "data.arrow")["text"].to_pylist()
    demos = arrow.read(context.input("demonstrations") / "data.arrow").to_pylist() if "demonstrations" in context.job["inputs"] else []
    fresh = context.work / "fresh"
    cluster.apply(
        "stages.fresh_model:make", folder=str(fresh), texts=texts + [t for d in demos for t in (d["prompt"], d["response"])],
        architecture=params["architecture"], seed=params["seed"],
    )  # fmt: skip
    limit = params["architecture"]["context"]
    plain = cluster.apply("stages.tokens:plain", folder=str(fresh), texts=texts, context=limit, remarks=True)
    sequences = [(ids[:1], ids[1:]) for ids in plain]
    if demos:
        chat = cluster.apply("stages.tokens:conversations", folder=str(fresh), rows=demos, answers=("response",), context=limit)
        wholes = [[*p, *r] for p, r in zip(chat["prompts"], chat["response"])]
        sequences += [(ids[:1], ids[1:]) for ids in wholes]
        context.facts["drops"] = chat["drops"]
    rows = Rows.of(sequences)
    done = cluster.train(
        "actor",
        Source(f"fresh:{context.key}", str(fresh), "causal", params["precision"]),
        rows,
        Recipe("stages.algorithms.objectives.sft:Likelihood", params["optimizer"], params["epochs"], params["seed"],
               **context.hints, state=str(context.state)),
        "training",
        folder=context.out / "model",
        tokenizer_from=fresh,
    )  # fmt: skip
    context.facts |= {"rows": len(rows), "tokens": int(rows.lengths_S.sum())}
    arrow.write(context.out / "metrics.arrow", arrow.METRICS, arrow.metric_rows("pretrain", done["metrics"]))
