"""One iteration of PPO: rollouts_k = generate(policy_k-1); experience_k = score(rollouts_k); update_k = train(actor, critic)."""


rule rollouts:
    input:
        unpack(manifests),
    output:
        manifest=STORE + "/{artifact}/manifest.json",
        rollouts=STORE + "/{artifact}/rollouts.arrow",
    wildcard_constraints:
        artifact=r"[^/]+/\d\d\d\d+/rollouts",
    params:
        job=job,
    threads: HEAVY
    message:
        "rollouts {wildcards.artifact}"
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
        job=job,
    threads: HEAVY
    message:
        "experience {wildcards.artifact}"
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
        job=job,
    threads: HEAVY
    message:
        "update {wildcards.artifact}"
    shell:
        "python -m stages run {wildcards.artifact:q} {JOBS:q}"
