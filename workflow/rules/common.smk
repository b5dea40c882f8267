"""The plan of the configuration, what of it is there already, and what every rule of ours shares."""

import atexit
import contextlib
import os
import re
import shutil
from functools import cache

ROOT = Path(workflow.basedir).parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from stages import config_check, locks, plan, pointers, targets
from stages.errors import UserError
from stages.resolve import Resolution


def say(line):
    print(f"rlhf: {line}", file=sys.stderr, flush=True)


@atexit.register
def say_when_full():
    """Whoever stumbled over it, Snakemake itself perhaps, the last line says what is the matter."""
    if shutil.disk_usage(Path.cwd()).free < 2**20:
        say(f"error: {Path.cwd()}: no disk space left; free some and run the same command again")


def or_end(function, *arguments):
    """The result; what the user must mend ends Snakemake with a line for each fault."""
    try:
        return function(*arguments)
    except UserError as error:
        for line in str(error).splitlines():
            say(f"error: {line}")
        os._exit(1)


PLAN = or_end(lambda: plan.Plan(config_check.load(config), Path.cwd()))
TARGETS = targets.targets(PLAN)
JOBS = targets.write_jobs(
    PLAN,
    {f"report/{t}": target.job for t, target in TARGETS.items()}
    | {f"track/{p}": {"pointer": p, "artifact": node.path} for p, node in PLAN.pointers.items()},
)
STORE = plan.STORE
HEAVY = workflow.cores or 1
"""Stages that compute take the whole machine, one after the other: the cluster's processes are planned for it."""


def rule_name(target):
    """`compare` and sweeps are called by their names, models by `<model>_final`."""
    return f"{target}_final" if target in PLAN.final else target


def requested():
    """Targets and artifacts that Snakemake is asked for, by rule or by file."""
    wanted, nodes = [], []
    by_rule = {rule_name(name): target for name, target in TARGETS.items()}
    for name in map(str, workflow.dag_settings.targets):
        file = os.path.relpath(name) if os.sep in name else name
        if name in by_rule:
            wanted.append(by_rule[name])
        elif file.startswith("results/report/") and Path(file).stem in TARGETS:
            wanted.append(TARGETS[Path(file).stem])
        elif file.startswith(f"{pointers.FOLDER}/") and Path(file).stem in PLAN.pointers:
            nodes.append(PLAN.pointers[Path(file).stem])
        elif os.path.dirname(file) in PLAN.nodes:
            nodes.append(PLAN.nodes[os.path.dirname(file)])
    return wanted, nodes


USING = contextlib.ExitStack()
"""Held until this process ends: nobody frees what a run has made and nothing names yet."""


@cache
def resolution():
    """What is there, what is linked or fetched now, and what is left to compute.

    Asked by the first input function, because only then does Snakemake know whether this is a dry run.
    """
    return or_end(resolve)


def lift_rate_limit():
    """Take Snakemake's default limit of 100 jobs a second away (not one that the user asked for).

    With it, every job that ends leaves a timer that fires each second as long as any job waits: a sweep of a thousand jobs
    takes a core for that, and every run ends up to a second later [V: 9.27].
    """
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if limit and (limit.max_jobs, limit.timespan) == (100, 1):
        workflow.scheduling_settings.max_jobs_per_timespan = None


def resolve():
    lift_rate_limit()
    wanted, nodes = requested()
    dry = workflow.executor_plugin is None or workflow.dryrun or workflow.touch
    if not dry:
        USING.enter_context(locks.shared(Path.cwd(), lambda: say("waiting for `rlhf gc`, which frees results here")))
    found = Resolution(PLAN, wanted, Path.cwd(), nodes)
    for note in found.notes:
        say(f"note: {note}")
    found.settle(dry=dry, say=say)
    if not dry:
        found.catch_up()
    if wanted or nodes:
        say(found.summary())
    workflow.dag.forcefiles |= found.stale() | found.left_behind
    return found


def folders(*stages, pattern=None):
    """Wildcard constraint: the artifacts of these stages."""
    found = sorted({n.path.removeprefix(f"{STORE}/") for n in PLAN.nodes.values() if n.stage in stages})
    return "|".join(map(re.escape, found)) or "none"


def manifests(wildcards):
    """Manifests of the inputs of an artifact that must be computed, by name; nothing for one that needs no computing."""
    node = PLAN.nodes[f"{STORE}/{wildcards.artifact}"]
    return {name: i.manifest for name, i in node.inputs.items()} if node.path in resolution().compute else {}


def how(wildcards):
    """Why a job is there, or how its artifact comes without computing (said in a dry run)."""
    path = f"{STORE}/{wildcards.artifact}"
    found = resolution().found[path]
    return f" ({found.why})" if path in resolution().compute else f" (no computing: {found.state})"
