"""What users ask for by name: models, sweeps, `compare`; and the file that tells every job what to do."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import fingerprint, manifest
from stages.config import Config
from stages.plan import STORE, Node, Plan, canonical
from stages.sweeps import points as swept


@dataclass(frozen=True)
class Target:
    """What a target of the workflow is made of: the artifacts it is asked for, all that they need, and what it reports."""

    core: dict[str, Node]
    closure: dict[str, Node]
    pointers: dict[str, Node]
    job: dict[str, Any]


def targets(plan: Plan) -> dict[str, Target]:
    """One target for every model and every sweep, and `compare` for all policies together that are no sweep's."""
    sweeps = {name: swept(name, sweep) for name, sweep in plan.config.sweeps.items()}
    points = {point.model for found in sweeps.values() for point in found}
    wanted = {name: [name] for name in plan.config.models}
    wanted["compare"] = [name for name in plan.evaluations if name not in points]
    wanted |= {name: [point.model for point in found] for name, found in sweeps.items()}
    found = {}
    for target, models in wanted.items():
        evaluations = {m: plan.evaluations[m] for m in models if m in plan.evaluations}
        if evaluations:
            evaluations = {plan.config.evaluation.baseline: plan.evaluations[plan.config.evaluation.baseline]} | evaluations
        core = {node.path: node for node in [*(plan.final[m] for m in models), *evaluations.values()]}
        closure = plan.closure(*core.values())
        made = {m: node for m, node in plan.final.items() if node.path in closure}
        pointers = {p: node for p, node in plan.pointers.items() if node.path in core or node.path in {n.path for n in made.values()}}
        job = {
            "target": target,
            "models": {m: node.path for m, node in made.items()},
            "evaluations": {m: e.path for m, e in evaluations.items()},
            "baseline": plan.config.evaluation.baseline,
            "experiment": target if target in sweeps else plan.config.experiment,
            "own": {m: [p for p, n in closure.items() if n.model == m and p != node.path] + [node.path] for m, node in made.items()},
            "iterations": {
                m: sorted(p for p in closure if p.startswith(f"{node.path.rsplit('/', 2)[0]}/")) for m, node in made.items() if node.folder
            },
            "sweep": {point.model: point.label for point in sweeps.get(target, ())},
            "config": _used(plan, made, closure),
            "code": fingerprint.fingerprint("stages.report"),
        }
        found[target] = Target(core, closure, pointers, job)
    return found


def _used(plan: Plan, models: dict[str, Node], closure: dict[str, Node]) -> dict[str, Any]:
    """The part of the configuration that a target depends on, every default written out."""
    whole = plan.config.model_dump(mode="json", by_alias=True, exclude={"hardware", "cluster", "sweeps"})
    data = {name: whole["data"][name] for name, node in plan.data_nodes.items() if node.path in closure}
    return whole | {"data": data, "models": {m: whole["models"][m] for m in models}}


def runtime(config: Config) -> str:
    """What a run needs to know that does not change its result, as JSON: code identity, hardware, cluster."""
    return canonical({"code_id": fingerprint.code_id(), "hardware": config.hardware.model_dump(), "cluster": config.cluster.model_dump()})


def write_jobs(plan: Plan, others: dict[str, dict]) -> str:
    """Everything that jobs are told, in one file named by its content: `runtime`, then a line for each artifact or name."""
    lines = [f"runtime\t{runtime(plan.config)}"]
    lines += [f"{name}\t{canonical(job)}" for name, job in others.items()]
    lines += [f"{path.removeprefix(STORE + '/')}\t{canonical(node.job)}" for path, node in plan.nodes.items()]
    text = "\n".join(lines) + "\n"
    path = Path(f"results/work/jobs/{hashlib.sha256(text.encode()).hexdigest()[:12]}.tsv")
    if not path.exists():
        manifest.write_text(path, text)
    return str(path)
