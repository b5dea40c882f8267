"""How long Snakemake takes to find that nothing is to be done, and to plan a run from nothing.

    python benchmarks/planning.py [--iterations 8 500] [--dry 1000]

Artifacts of the right keys with empty weights stand in for a finished run: planning reads manifests, never weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def project(folder: Path) -> Path:
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=folder, check=True)
    return folder


def finish(folder: Path, assignments: str) -> None:
    """Lay out every artifact of `ppo_final`, with its true key, and its report and pointers."""
    from stages import config_check, configuration, manifest, plan, pointers, report, targets
    from stages.keys import run_key

    os.chdir(folder)
    planned = plan.Plan(config_check.load(configuration.merged([], assignments)), folder)
    target = targets.targets(planned)["ppo"]
    made: dict[str, dict] = {}
    for path, node in target.closure.items():
        job, artifact = node.job, folder / path
        inputs = {name: made[i.path] for name, i in node.inputs.items()}
        key, parts = run_key(job, {name: m["content"] for name, m in inputs.items()})
        artifact.mkdir(parents=True)
        for name in [*plan.STAGES[node.stage].outputs, "model/config.json"]:
            (artifact / name).parent.mkdir(exist_ok=True)
            (artifact / name).write_text(key)
        outputs = manifest.hash_tree(artifact)
        made[path] = {
            "key": key, "stage": node.stage, "model": node.model, "plan": job["plan"], "version": job["version"], "code": job["code"],
            "modules": {}, "packages": parts["packages"], "params": job["params"], "facts": {}, "outputs": outputs,
            "inputs": {n: {"path": job["inputs"][n], "key": m["key"], "content": m["content"]} for n, m in inputs.items()},
            "content": manifest.hash_file(artifact / "model/config.json"),
        }  # fmt: skip
        written = {name: (artifact / name).stat().st_mtime_ns for name in outputs}
        manifest.write_json(artifact / "run_info.json", {"written": written})
        manifest.write_json(artifact / manifest.NAME, made[path])
    for name, node in target.pointers.items():
        manifest.write_text(
            pointers.FOLDER / f"{name}.dvc", json.dumps({"outs": [{"md5": "0", "path": "x"}], "meta": {"run_key": made[node.path]["key"]}})
        )
    contents = {path: made[path]["content"] for path in target.job["evaluations"].values()}
    manifest.write_json(report.REPORT / "ppo.json", {"job": target.job, "made": contents, "rows": []})


def snakemake(folder: Path, *arguments: str) -> tuple[float, str]:
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "workflow/Snakefile"), "--directory", str(folder),
               "--workflow-profile", str(ROOT / "workflow/profiles/default"), "--cores", "all", "ppo_final", *arguments]  # fmt: skip
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return time.perf_counter() - began, done.stdout + done.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, nargs="*", default=[8, 500])
    parser.add_argument("--dry", type=int, nargs="*", default=[1000])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for n in asked.iterations:
            folder = project(Path(scratch) / f"finished-{n}")
            finish(folder, f"ppo.iterations={n}")
            seconds, said = snakemake(folder, "--config", f"set=ppo.iterations={n}")
            assert "Nothing to be done" in said, said[-2000:]
            print(f"nothing to do, {n} iterations: {seconds:.2f} s", flush=True)
        for n in asked.dry:
            folder = project(Path(scratch) / f"empty-{n}")
            seconds, said = snakemake(folder, "-n", "--config", f"set=ppo.iterations={n}")
            print(f"dry run from nothing, {n} iterations ({said.count('rollouts ppo-')} of them planned): {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    main()
