"""What users ask for: a model, finished, evaluated, reported and versioned."""

rule track:
    """DVC's pointer to a finished model; one at a time."""
    input:
        manifest=lambda w: PLAN.pointers[w.pointer].manifest,
    output:
        pointer="data/checkpoints/{pointer}.dvc",
    wildcard_constraints:
        pointer="|".join(map(re.escape, PLAN.pointers)) or "none",
    params:
        job=lambda w: TRACKED[w.pointer],
    resources:
        dvc=1,
    message:
        "track {wildcards.pointer}"
    shell:
        "python -m stages track {wildcards.pointer:q} {JOBS:q}"


rule report:
    """Tables of what a target made; results/report/summary.md and summary.json show all that is finished."""
    input:
        lambda w: TARGETS[w.target].manifests,
    output:
        "results/report/{target}.json",
    wildcard_constraints:
        target="|".join(map(re.escape, TARGETS)),
    params:
        job=lambda w: TARGETS[w.target].job,
    message:
        "report {wildcards.target}"
    shell:
        "python -m stages report {wildcards.target:q} {JOBS:q}"


for _name, _target in TARGETS.items():

    rule:
        name:
            _name if _name == "compare" else f"{_name}_final"
        input:
            f"results/report/{_name}.json",
            [f"data/checkpoints/{p}.dvc" for p in _target.pointers],
            _target.manifests,  # all of it: what is missing in the middle is made again


onsuccess:
    summary = Path("results/report/summary.md")
    if summary.exists():
        print(summary.read_text().partition("\n## ")[0].strip(), flush=True)
