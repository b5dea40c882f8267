"""Stage update: actor and critic trained on one iteration's experience, each going on from its own optimizer state."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages import arrow, manifest
from stages.cluster.groups import source
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows
from stages.encoded import dialogues
from stages.errors import UserError


def run(context) -> None:
    params, cluster = context.params, context.cluster
    experience = arrow.read(context.input("experience") / "experience.arrow")
    responses = len(experience)  # the clock's unit, whatever dynamic filtering leaves of them
    experience = experience.filter(experience["used"])
    columns = {name: experience[name].to_pylist() for name in _COLUMNS}
    sequences = list(zip(columns["prompt_ids"], columns["response_ids"]))
    roles = ("actor", "critic") if "critic" in context.job["inputs"] else ("actor",)
    work = {
        "actor": (
            "stages.algorithms.objectives.actor:Actor",
            {"temperature": params["sampling"]["temperature"], **{name: params[name] for name in _ACTOR}},
            {"old_logprobs": columns["trainer_logprobs"], "advantages": columns["advantages"]},
        ),
        "critic": (
            "stages.algorithms.objectives.critic:Critic",
            {"clip": params.get("value_clip")},
            {"old_values": columns["values"], "returns": columns["returns"]},
        ),
    }
    fields = work["actor"][2]
    if params["kl_loss_coef"]:
        fields["reference_logprobs"] = columns["reference_logprobs"]
    if params["engine_correction"] != "none":
        low, high = params["engine_range"]
        fields["importance"] = cluster.apply(
            "stages.advantages:engine_weights", trainer=columns["trainer_logprobs"], engine=columns["logprobs"],
            kind=params["engine_correction"], low=low, high=high,
        )  # fmt: skip
    mixed = _mixed(context) if params["ptx_coef"] else None
    done: dict[str, dict] = {}

    def train(role: str) -> None:
        objective, options, fields = work[role]
        optimizer = params[role]
        per_iteration = params["epochs"] * math.ceil(responses / optimizer["batch_size"])
        own = "critic" if role == "critic" and params["iteration"] > 1 else "actor"  # the first critic is no update's
        before = _optimizer(context.input("previous"), role) if "previous" in context.job["inputs"] else None
        done[role] = cluster.train(
            role,
            source(context, role, "causal" if role == "actor" else "scorer", role=own, precision=params["precision"],
                   optimizer=str(before) if before else None),
            Rows.of(sequences, token_fields=fields),
            Recipe(objective, optimizer, params["epochs"], params["seed"] + params["iteration"], options,
                   first_step=(params["iteration"] - 1) * per_iteration, total_steps=params["horizon"] * per_iteration,
                   **context.hints, state=str(context.state / role), **(_actor_only(params) if role == "actor" else {})),
            f"{params['iteration']} {role}",
            mixed=mixed if role == "actor" else None,
            folder=context.out / ("model" if role == "actor" else "critic"),
            tokenizer_from=context.model_folder(role, own),
            optimizer_to=context.out / "optimizer" / role,
        )  # fmt: skip

    _side_by_side(train, roles, cluster.apart("actor", "critic"))
    context.keep_warm(*roles)
    context.facts["rows"] = len(sequences)
    _look_for_idle(context, columns["advantages"], responses)
    if params["ema_decay"] is not None:
        with context.phase("writing"):
            _average(context)
    arrow.write(
        context.out / "metrics.arrow", arrow.METRICS,
        [row for role in roles for row in arrow.metric_rows(role, done[role]["metrics"])],
    )  # fmt: skip


def _optimizer(previous: Path, role: str) -> Path:
    """Where a role's optimizer state lies, without `.safetensors`."""
    if not any((previous / "optimizer").glob(f"{role}*.safetensors")):
        raise UserError(f"{previous}: its optimizer state was freed; the same command makes it again")
    return previous / "optimizer" / role


def _side_by_side(train, roles: tuple[str, ...], apart: bool) -> None:
    """All at once where they have processes of their own; one after the other where they share them."""
    if not apart:
        for role in roles:
            train(role)
        return
    with ThreadPoolExecutor(len(roles)) as pool:
        for done in [pool.submit(train, role) for role in roles]:
            done.result()


_COLUMNS = ("prompt_ids", "response_ids", "logprobs", "trainer_logprobs", "reference_logprobs", "advantages", "values", "returns")
_ACTOR = ("clip_low", "clip_high", "dual_clip", "kl_loss_coef", "kl_loss_estimator", "entropy_coef")
_PATIENCE = 3
"""Iterations in a row that may train nothing before the run fails."""


def _actor_only(params: dict) -> dict:
    stop = params["stop_at_kl"]
    return {
        "frozen_steps": params["frozen_steps"], "mix_coef": params["ptx_coef"], "mix_seed": params["seed"],
        "stop_above": None if stop is None else ("approximate_kl_k3", stop),
    }  # fmt: skip


def _mixed(context) -> Rows:
    """Rows of the data that is mixed in, for the actor's tokenizer."""
    table, folder = arrow.read(context.input("ptx") / "data.arrow"), context.model_folder("actor")
    if "text" in table.column_names:
        limit = context.cluster.apply("stages.tokens:special", folder=str(folder))["context"]
        plain = context.cluster.apply("stages.tokens:plain", folder=str(folder), texts=table["text"].to_pylist(), context=limit)
        return Rows.of([(ids[:1], ids[1:]) for ids in plain])
    return dialogues(context, "ptx", folder)[0]


def _look_for_idle(context, advantages, responses: int) -> None:
    """An iteration that trains nothing is said, by name; several in a row fail."""
    params = context.params
    own, before = (_hashes(folder) for folder in (context.out / "model", context.model_folder("actor")))
    frozen = params["iteration"] * math.ceil(responses / params["actor"]["batch_size"]) * params["epochs"] <= params["frozen_steps"]
    reasons = []
    if not any(a for row in advantages for a in row):
        reasons.append("all advantages are zero")
    if not frozen and own == before:
        reasons.append("no parameter of the actor changed")
    idle = 0
    if reasons:
        earlier = manifest.read(context.input("previous"))["facts"] if "previous" in context.job["inputs"] else {}
        idle = earlier.get("idle_iterations", 0) + 1
        context.log(f"warning: trains-nothing: {' and '.join(reasons)} in iteration {params['iteration']}")
        if idle >= _PATIENCE:
            raise UserError(f"{context.model}: trains-nothing: {idle} iterations in a row ({' and '.join(reasons)}); look at the rewards")
    context.facts["idle_iterations"] = idle


def _hashes(folder) -> dict[str, str]:
    """Of all weights; an imported model may be cut into other files than what we write, and then differs."""
    paths = sorted(folder.glob("*.safetensors"))
    return dict(zip((path.name for path in paths), manifest.hash_files(paths)))


def _average(context) -> None:
    """ema/: decay * the average before (at first the actor's start) + (1 - decay) * the actor."""
    before = context.model_folder("actor")
    if "previous" in context.job["inputs"]:
        before = context.input("previous") / "ema"
    context.cluster.apply(
        "stages.ema:average", before=str(before), now=str(context.out / "model"), out=str(context.out / "ema"),
        decay=context.params["ema_decay"],
    )  # fmt: skip
