"""One iteration: sample; then score and train (PPO), or score, choose and train (rejection sampling, iterative DPO)."""


rule rollouts:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        rollouts=STORE + "/{artifact}/rollouts.arrow",
    wildcard_constraints:
        artifact=r"[^/]+/\d\d\d\d+/rollouts",
    params:
        how=how,
    threads: HEAVY
    message:
        "rollouts {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule selection:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        rows=STORE + "/{artifact}/data.arrow",
        scores=STORE + "/{artifact}/scores.arrow",
    wildcard_constraints:
        artifact=r"[^/]+/\d\d\d\d+/selection",
    params:
        how=how,
    threads: HEAVY
    message:
        "selection {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule experience:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        experience=STORE + "/{artifact}/experience.arrow",
    wildcard_constraints:
        artifact=r"[^/]+/\d\d\d\d+/experience",
    params:
        how=how,
    threads: HEAVY
    message:
        "experience {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule update:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
    wildcard_constraints:
        artifact=r"[^/]+/\d\d\d\d+/update",
    params:
        how=how,
    threads: HEAVY
    message:
        "update {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
