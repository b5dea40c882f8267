"""Models that are made in one piece: imported, pretrained, fine-tuned, reward models, direct preference methods."""


rule import_model:
    output:
        manifest=STORE + "/{artifact}/manifest.json",
    wildcard_constraints:
        artifact=folders("import"),
    params:
        how=how,
    threads: HEAVY
    message:
        "import {wildcards.artifact}{params.how}"
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
        how=how,
    threads: HEAVY
    message:
        "pretrain {wildcards.artifact}{params.how}"
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
        how=how,
    threads: HEAVY
    message:
        "sft {wildcards.artifact}{params.how}"
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
        how=how,
    threads: HEAVY
    message:
        "reward model {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule reference:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        logprobs=STORE + "/{artifact}/reference.arrow",
    wildcard_constraints:
        artifact=folders("reference"),
    params:
        how=how,
    threads: HEAVY
    message:
        "reference log-probabilities {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule dpo:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
    wildcard_constraints:
        artifact=folders("dpo"),
    params:
        how=how,
    threads: HEAVY
    message:
        "dpo {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule kto:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        metrics=STORE + "/{artifact}/metrics.arrow",
    wildcard_constraints:
        artifact=folders("kto"),
    params:
        how=how,
    threads: HEAVY
    message:
        "kto {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"


rule condition:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        rows=STORE + "/{artifact}/data.arrow",
    wildcard_constraints:
        artifact=folders("condition"),
    params:
        how=how,
    threads: HEAVY
    message:
        "condition {wildcards.artifact}{params.how}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
