"""What users ask for: a model, finished, evaluated, reported and versioned."""

def unless_current(file, nodes):
    """Manifests that a file is made from; nothing when it is what they are: Snakemake would go by their times."""
    found = resolution()
    todo = found.compute | found.linkable
    return [node.manifest for node in nodes] if file in found.left_behind or any(node.path in todo for node in nodes) else []


rule track:
    """DVC's pointer to a finished model or its evaluation; one at a time."""
    input:
        lambda w: unless_current(f"data/checkpoints/{w.pointer}.dvc", [PLAN.pointers[w.pointer]]),
    output:
        pointer="data/checkpoints/{pointer}.dvc",
    wildcard_constraints:
        pointer="|".join(map(re.escape, PLAN.pointers)) or "none",
    resources:
        dvc=1,
    message:
        "track {wildcards.pointer}"
    shell:
        "python -m stages track {wildcards.pointer:q} {JOBS:q}"


rule report:
    """Tables of what a target made; results/report/summary.md and summary.json show all that is finished and was judged alike; one at a time."""
    input:
        lambda w: unless_current(f"results/report/{w.target}.json", TARGETS[w.target].core.values()),
    output:
        "results/report/{target}.json",
    wildcard_constraints:
        target="|".join(map(re.escape, TARGETS)),
    resources:
        report=1,
    message:
        "report {wildcards.target}"
    shell:
        "python -m stages report {wildcards.target:q} {JOBS:q}"


def products(target):
    """What a target must leave: its artifacts, all that is computed or linked on the way, pointers and its report."""
    found = resolution()
    made = [path for path in target.closure if path in target.core or path in found.compute or path in found.linkable]
    return [
        *(f"{path}/manifest.json" for path in made),
        *(f"data/checkpoints/{p}.dvc" for p in found.pointers(target)),
        f"results/report/{target.job['target']}.json",
    ]


for _name, _target in TARGETS.items():

    rule:
        name:
            rule_name(_name)
        input:
            lambda w, target=_target: products(target),
        message:
            f"{rule_name(_name)} is complete"


onsuccess:
    for _asked in resolution().targets:
        print(Path("results/report", f"{_asked.job['target']}.md").read_text().partition("\n## ")[0].strip(), flush=True)
