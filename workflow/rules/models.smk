"""Models that are made in one piece: imported, pretrained, fine-tuned, reward models."""


rule import_model:
    output:
        manifest=STORE + "/{artifact}/manifest.json",
    wildcard_constraints:
        artifact=folders("import"),
    params:
        job=job,
    threads: HEAVY
    message:
        "import {wildcards.artifact}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule pretrain:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
    wildcard_constraints:
        artifact=folders("pretrain"),
    params:
        job=job,
    threads: HEAVY
    message:
        "pretrain {wildcards.artifact}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule sft:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
    wildcard_constraints:
        artifact=folders("sft"),
    params:
        job=job,
    threads: HEAVY
    message:
        "sft {wildcards.artifact}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule reward_model:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
        heldout=STORE + "/{artifact}/heldout.arrow",
    wildcard_constraints:
        artifact=folders("reward_model"),
    params:
        job=job,
    threads: HEAVY
    message:
        "reward model {wildcards.artifact}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
