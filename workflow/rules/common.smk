"""The plan of the configuration, and what every rule of ours shares: manifests in, manifests out, one parameter."""

import json
import os
import re

ROOT = Path(workflow.basedir).parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from stages import config_check, plan
from stages.errors import UserError


def planned():
    """The plan of the merged configuration; a fault in it ends Snakemake with a line for each."""
    try:
        return plan.Plan(config_check.load(config), Path.cwd())
    except UserError as error:
        for line in str(error).splitlines():
            print(f"rlhf: error: {line}", file=sys.stderr, flush=True)
        os._exit(1)


PLAN = planned()
TARGETS = plan.targets(PLAN)
TRACKED = {p: plan.canonical({"pointer": p, "artifact": node.path}) for p, node in PLAN.pointers.items()}
JOBS = plan.write_jobs(
    PLAN, {f"report/{t}": target.job for t, target in TARGETS.items()} | {f"track/{p}": made for p, made in TRACKED.items()}
)
STORE = plan.STORE
HEAVY = workflow.cores or 1
"""Stages that compute take the whole machine, one after the other: the cluster's processes are planned for it."""


def folders(*stages, pattern=None):
    """Wildcard constraint: the artifacts of these stages."""
    found = sorted({n.path.removeprefix(f"{STORE}/") for n in PLAN.nodes.values() if n.stage in stages})
    return "|".join(map(re.escape, found)) or "none"


def manifests(wildcards):
    """Manifests of the inputs of an artifact, by name."""
    return {name: node.manifest for name, node in PLAN.nodes[f"{STORE}/{wildcards.artifact}"].inputs.items()}


def job(wildcards):
    """The one semantic parameter of a rule."""
    return PLAN.nodes[f"{STORE}/{wildcards.artifact}"].job
