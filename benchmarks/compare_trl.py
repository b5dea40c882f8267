"""Ours beside TRL: the same model, rows, lengths and epochs, one thread each, in turns. Ratios only mean something.

    python benchmarks/compare_trl.py [--only sft dpo ...] [--rounds 2]

Ours is measured as users run it: the workflow, on a warm cluster; a PPO step is a whole iteration, Snakemake included; once as
it comes, once with `hardware: {compile: true}`. TRL 1.16 has no PPO any more, so that is raced against 1.12. TRL is installed
into .bench/ (no part of our environment).
Results: benchmarks/results/*.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / ".bench"
sys.path.insert(0, str(ROOT))
BATCH = 8
PPO = {"8x24": (8, 24), "64x64": (64, 64)}
"""Responses of a step and their length: prompts_per_iteration, max_tokens."""
STEPS = 20

WORLD = """
data:
  corpus: {rows: 600}
  demos: {rows: 240}
  preferences: {rows: 240}
  heldout: {rows: 16}
  prompts: {rows: 2048}
  eval_prompts: {rows: 16}
models:
  base: {optimizer: {batch_size: 32}}
  sft: {optimizer: {batch_size: 8}}
  rm: {optimizer: {batch_size: 8}}
  dpo: {optimizer: {batch_size: 8}}
  kto: {optimizer: {batch_size: 8}}
hardware: {ranks: 1, threads: 1, zero_stage: 1, engines: {threads: 1}}
"""


def trl(version: str) -> Path:
    """A folder with that TRL, installed once."""
    folder = BENCH / f"trl-{version}"
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"trl=={version}"], check=True)
    return folder


def peer(version: str, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/trl_peer.py"), *arguments], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(trl(version)), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"TRL {arguments[0]} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


class Ours:
    """A small project; every artifact is computed, never restored: each measurement changes a seed."""

    def __init__(self, folder: Path, compiled: bool):
        self.folder = folder
        self.environment = os.environ | {"RLHF_STATE_DIR": str(folder) + "-cluster"}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=folder, check=True)
        (folder / "world.yaml").write_text(WORLD.replace("ranks: 1,", f"ranks: 1, compile: {str(compiled).lower()},"))

    def run(self, target: str, assignments: str = "") -> float:
        command = [
            sys.executable, "-m", "snakemake", "-s", str(ROOT / "workflow/Snakefile"), "--directory", str(self.folder),
            "--workflow-profile", str(ROOT / "workflow/profiles/default"), "--cores", "all", target, "--configfile",
            str(self.folder / "world.yaml"), *(["--config", f"set={assignments}"] if assignments else []),
        ]  # fmt: skip
        began = time.perf_counter()
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            sys.exit(f"ours, {target} failed:\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
        return time.perf_counter() - began

    def close(self) -> None:
        subprocess.run([sys.executable, "-m", "stages", "cluster", "down"], env=self.environment, check=True, capture_output=True)

    def newest(self, pattern: str) -> Path:
        return max((self.folder / "results/store").glob(pattern), key=lambda path: (path / "manifest.json").stat().st_mtime)

    def rows(self, pattern: str, file: str) -> list[dict]:
        from stages import arrow

        return arrow.read(self.newest(pattern) / file).to_pylist()


def info(artifact: Path) -> dict:
    return json.loads((artifact / "run_info.json").read_text())


def lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def supervised(both: list[Ours], algorithm: str, round_: int) -> list[dict]:
    """Step and setup seconds of SFT, reward model, DPO or KTO on the same rows: ours, ours compiled, TRL's."""
    from stages import tokens

    ours = both[0]
    base = str(ours.newest("base-*" if algorithm == "sft" else "sft-*") / "model")
    tokenizer = tokens._tokenizer(base)
    kind = "demos-*" if algorithm == "sft" else "preferences-*"
    told = []
    for row in ours.rows(kind, "data.arrow"):
        prompt = tokens._render(tokenizer, row["prompt"])
        answer = lambda text, prompt=prompt, row=row: tokens._render(tokenizer, row["prompt"], text)[len(prompt) :].strip("\n")
        if algorithm == "sft":
            told.append({"prompt": prompt, "completion": answer(row["response"])})
        elif algorithm == "kto":
            told += [{"prompt": prompt, "completion": answer(row[a]), "label": a == "chosen"} for a in ("chosen", "rejected")]
        else:
            told.append({"prompt": prompt, "chosen": answer(row["chosen"]), "rejected": answer(row["rejected"])})
    data = lines(BENCH / f"{algorithm}.jsonl", told)
    theirs = peer("1.16.0", algorithm, "--model", base, "--data", data, "--batch", str(BATCH), "--steps", str(STEPS))
    return [*(_trained(one, {"reward": "rm"}.get(algorithm, algorithm), round_) for one in both), theirs]


def _trained(ours: Ours, model: str, round_: int) -> dict:
    ours.run(f"{model}_final", f"{model}.seed={100 + round_}")
    found = info(ours.newest(f"{model}-*"))
    pace = next(iter(found["pace"].values()))
    setup = found["finished"] - found["started"] - pace["steps"] * pace["median_step_s"]
    return {"step_s": pace["median_step_s"], "setup_s": setup, "steps": pace["steps"]}


def ppo(both: list[Ours], size: str, round_: int) -> list[dict]:
    """Seconds of a whole PPO step, and of its update alone: ours, ours compiled, TRL's."""
    responses, length = PPO[size]
    made, (run, *_) = zip(*(_iterated(one, responses, length, round_) for one in both))
    from stages import arrow

    prompts = [{"input_ids": r["prompt_ids"]} for k in range(1, 7) for r in
               arrow.read(run / f"{k:04d}/rollouts/rollouts.arrow").to_pylist()]  # fmt: skip
    theirs = peer(
        "1.12.0", "ppo", "--model", str(both[0].newest("sft-*") / "model"), "--reward-model", str(both[0].newest("rm-*") / "model"),
        "--data", lines(BENCH / f"ppo-{size}.jsonl", prompts), "--batch", str(responses), "--steps", "6", "--warmup", "1",
        "--new-tokens", str(length),
    )  # fmt: skip
    return [*made, theirs]


def _iterated(ours: Ours, responses: int, length: int, round_: int) -> tuple[dict, Path]:
    options = {
        "iterations": 6, "horizon": 100, "prompts_per_iteration": responses, "sampling.max_tokens": length, "epochs": 4,
        "actor.batch_size": responses, "critic.batch_size": responses, "kl_coef": 0.05, "seed": 100 + round_,
    }  # fmt: skip
    ours.run("ppo_final", ",".join(f"ppo.{key}={value}" for key, value in options.items()))
    run = ours.newest("ppo-*/0006/update").parents[1]
    stages = [[info(run / f"{k:04d}" / s) for s in ("rollouts", "experience", "update")] for k in range(1, 7)]
    whole = [after[2]["finished"] - before[2]["finished"] for before, after in itertools.pairwise(stages)]
    update = [of[2]["phases"]["training"] for of in stages[1:]]
    phases = {name: statistics.median(sum(s["phases"].get(name, 0.0) for s in of) for of in stages[1:])
              for name in ("generation", "weight sync", "logits and rewards", "advantages", "training", "writing")}  # fmt: skip
    return {"step_s": statistics.median(whole), "update_s": statistics.median(update), "phases": phases}, run


def main() -> None:
    races = {name: (supervised, name) for name in ("sft", "reward", "dpo", "kto")} | {f"ppo {size}": (ppo, size) for size in PPO}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(races), default=list(races))
    parser.add_argument("--rounds", type=int, default=2, help="How often each side is measured, in turns.")
    asked = parser.parse_args()
    BENCH.mkdir(exist_ok=True)
    for version in ("1.16.0", "1.12.0"):
        trl(version)
    both = [Ours(BENCH / "project", compiled=False), Ours(BENCH / "project-compiled", compiled=True)]
    try:
        for ours, target in itertools.product(both, ("dpo_final", "kto_final", "ppo_final")):
            ours.run(target, "ppo.iterations=1")  # makes base, sft and rm, and warms the cluster
        for name in asked.only:
            race, argument = races[name]
            _tell(name, [race(both, argument, round_) for round_ in range(asked.rounds)])
    finally:
        for ours in both:
            ours.close()


def _tell(name: str, rounds: list[list[dict]]) -> None:
    """Print and keep the ratios of the best rounds of each side."""
    keys = ("step_s", "update_s") if name.startswith("ppo") else ("step_s", "setup_s")
    best = {key: [min(of[side][key] for of in rounds) for side in range(3)] for key in keys}
    ratios = {key: {"ours": times[2] / times[0], "ours compiled": times[2] / times[1]} for key, times in best.items()}
    print(f"{name:10}", "  ".join(
        f"{key.removesuffix('_s')}: ours {best[key][0]:.3f} s, compiled {best[key][1]:.3f} s, TRL {best[key][2]:.3f} s, "
        f"{ratio['ours']:.2f} and {ratio['ours compiled']:.2f} times" for key, ratio in ratios.items()), flush=True)  # fmt: skip
    results = ROOT / "benchmarks/results"
    results.mkdir(exist_ok=True)
    (results / f"{name.replace(' ', '-')}.json").write_text(
        json.dumps({"ratios": ratios, "rounds": [dict(zip(("ours", "ours compiled", "trl"), of)) for of in rounds],
                    "load": os.getloadavg()[0], "cores": os.cpu_count(), "processor": _processor(),
                    "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}, indent=1) + "\n"
    )  # fmt: skip


def _processor() -> str:
    """What instructions a core has decides how much of a step is matrix products."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    return " ".join([platform.machine(), *(flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags)])


if __name__ == "__main__":
    main()
