"""Stage update: actor and critic trained on one iteration's experience, each going on from its own optimizer state."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

from stages import arrow
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows


def run(context) -> None:
    params, cluster = context.params, context.cluster
    experience = arrow.read(context.input("experience") / "experience.arrow")
    columns = {name: experience[name].to_pylist() for name in
               ("prompt_ids", "response_ids", "trainer_logprobs", "advantages", "values", "returns")}  # fmt: skip
    sequences = list(zip(columns["prompt_ids"], columns["response_ids"]))
    roles = ("actor", "critic") if "critic" in context.job["inputs"] else ("actor",)
    work = {
        "actor": (
            "stages.algorithms.objectives.actor:Actor",
            {"temperature": params["sampling"]["temperature"], "clip_low": params["clip_low"], "clip_high": params["clip_high"]},
            {"old_logprobs": columns["trainer_logprobs"], "advantages": columns["advantages"]},
        ),
        "critic": (
            "stages.algorithms.objectives.critic:Critic",
            {"clip": params.get("value_clip")},
            {"old_values": columns["values"], "returns": columns["returns"]},
        ),
    }
    done: dict[str, dict] = {}

    def train(role: str) -> None:
        objective, options, fields = work[role]
        optimizer = params[role]
        per_iteration = params["epochs"] * math.ceil(len(sequences) / optimizer["batch_size"])
        before = context.input("previous") / "optimizer" / f"{role}.safetensors" if "previous" in context.job["inputs"] else None
        done[role] = cluster.train(
            role,
            source(context, role, "causal" if role == "actor" else "scorer", role=role, precision=params["precision"],
                   optimizer=str(before) if before else None),
            Rows.of(sequences, token_fields=fields),
            Recipe(objective, optimizer, params["epochs"], params["seed"] + params["iteration"], options,
                   first_step=(params["iteration"] - 1) * per_iteration, total_steps=params["horizon"] * per_iteration,
                   **context.hints, state=str(context.state / role)),
            f"{params['iteration']} {role}",
            folder=context.out / ("model" if role == "actor" else "critic"),
            tokenizer_from=context.model_folder(role, role),
            optimizer_to=context.out / "optimizer" / f"{role}.safetensors",
        )  # fmt: skip

    _side_by_side(train, roles, cluster.apart("actor", "critic"))
    context.keep_warm(*roles)
    context.facts["rows"] = len(sequences)
    arrow.write(
        context.out / "metrics.arrow", arrow.METRICS,
        [row for role in roles for row in arrow.metric_rows(role, done[role]["metrics"])],
    )  # fmt: skip


def _side_by_side(train, roles: tuple[str, ...], apart: bool) -> None:
    """All at once where they have processes of their own; one after the other where they share them."""
    if not apart:
        for role in roles:
            train(role)
        return
    with ThreadPoolExecutor(len(roles)) as pool:
        for done in [pool.submit(train, role) for role in roles]:
            done.result()
