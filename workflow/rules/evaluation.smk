"""Each policy on the evaluation prompts, against the baseline."""


rule evaluate:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        samples=STORE + "/{artifact}/samples.arrow",
        summary=STORE + "/{artifact}/summary.json",
    wildcard_constraints:
        artifact=folders("evaluate"),
    params:
        how=how,
    threads: HEAVY
    message:
        "evaluate {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
