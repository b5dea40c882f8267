"""Data sets: made by the embedded world, or taken from a file or a hub, checked row by row."""


rule data:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        rows=STORE + "/{artifact}/data.arrow",
    wildcard_constraints:
        artifact=folders("data"),
    params:
        how=how,
    message:
        "data {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
