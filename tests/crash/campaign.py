"""Kill a random process of a run at a random time, run the same command again, and so on; then compare every manifest.

    python tests/crash/campaign.py --kills 50 [--seed S] [--log FOLDER]

Victims: Snakemake, the rule's client, the dispatcher, an engine, a trainer rank, the whole local Ray head. A run that ends
by itself must have the manifests of an undisturbed run; then the next one begins in an empty folder, until all kills are
done. Printed for each kill: whom, in the middle of what, and what work was lost: never more than `save_every` steps of
a training or what an engine answers at a time, or a stage that keeps no state and is short. Exit status 0 when all runs ended equal
and no kill cost more than that.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
WORLD = Path(__file__).with_name("world.yaml")
SAVE_EVERY = 10
"""The most steps between two states of any model in world.yaml."""
AT_A_TIME = 256
"""Responses that an engine works at (hardware.engines.max_num_seqs)."""
LOST = re.compile(r"rlhf: (?P<what>.+) goes on after (?P<kept>\d+) (?P<unit>steps|responses); (?P<again>\d+) lost")
JOB = re.compile(r"^Job \d+: (.+)$")
VICTIMS = {
    "snakemake": lambda line: "-m snakemake" in line,
    "client": lambda line: "-m stages run" in line and not line.startswith("/bin/sh") and "bash" not in line.split(" ")[0],
    "dispatcher": lambda line: line.startswith("ray::Dispatcher"),
    "engine": lambda line: line.startswith("ray::Engine"),
    "trainer rank": lambda line: line.startswith("ray::TrainerRank"),
    "head": lambda line: "gcs_server" in line,
}


@dataclass
class World:
    folder: Path
    environment: dict[str, str]

    def new(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=folder, check=True)
        subprocess.run([sys.executable, "-m", "dvc", "config", "cache.type", "hardlink,copy"], cwd=folder, check=True)
        return folder

    def start(self, folder: Path, log) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "workflow/Snakefile"), "--directory", str(folder),
                   "--workflow-profile", str(ROOT / "workflow/profiles/default"), "--cores", "all", "ppo_final",
                   "--configfile", str(WORLD)]  # fmt: skip
        return subprocess.Popen(
            command,
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Living processes of this campaign, by kind."""
        found: dict[str, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                kind = next((k for k, is_one in VICTIMS.items() if is_one(line)), None)
                if kind and process.environ().get("RLHF_STATE_DIR") == self.environment["RLHF_STATE_DIR"]:
                    found.setdefault(kind, []).append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def kill(self, kind: str, process: psutil.Process) -> None:
        if kind == "head":
            sys.path.insert(0, str(ROOT))
            from stages.cluster import processes

            leader = processes.identify(os.getsid(process.pid)) or processes.identify(process.pid)
            for pid, _ in processes.family([leader]):
                os.kill(pid, signal.SIGKILL)
        else:
            process.kill()


def manifests(folder: Path) -> dict[str, str]:
    store = folder / "results/store"
    return {str(p.relative_to(store)): p.read_text() for p in sorted(store.rglob("manifest.json"))}


def doing(log: Path) -> str:
    """What a run was in the middle of, by its log."""
    found = "planning"
    for line in log.read_text(errors="replace").splitlines():
        if match := JOB.match(line):
            found = match[1].replace(" (not made yet)", "")
    return re.sub(r" \(waits for.*", "", found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="Keep everything in this folder (default: a temporary one).")
    asked = parser.parse_args()
    if asked.log:
        asked.log.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="campaign-", dir=asked.log))
    state = tempfile.mkdtemp(prefix="rlhf-")
    world = World(folder, os.environ | {"RLHF_STATE_DIR": state, "PYTHONUNBUFFERED": "1"})
    try:
        return campaign(world, asked.kills, random.Random(asked.seed))
    finally:
        subprocess.run([sys.executable, "-m", "stages", "cluster", "down"], cwd=ROOT, env=world.environment, check=False)


def campaign(world: World, kills: int, rng: random.Random) -> int:
    undisturbed = world.new("undisturbed")
    began = time.perf_counter()
    with (world.folder / "undisturbed.log").open("w") as log:
        assert world.start(undisturbed, log).wait() == 0, (world.folder / "undisturbed.log").read_text()[-3000:]
    expected = manifests(undisturbed)
    print(f"undisturbed run: {len(expected)} artifacts, {time.perf_counter() - began:.0f} s", flush=True)
    done = equal = runs = attempts = worst_steps = worst_responses = 0
    pending: list[int] = []
    while done < kills:
        runs += 1
        folder = world.new(f"run-{runs}")
        while True:
            attempts += 1
            path = world.folder / f"attempt-{attempts}.log"
            with path.open("w") as log:
                process = world.start(folder, log)
                killed = None
                if done < kills:
                    killed = strike(world, process, path, rng, done + 1)
                code = process.wait()
                wait_for_orphan = killed == "snakemake"
            text = path.read_text(errors="replace")
            for match in LOST.finditer(text):
                again = int(match["again"])
                if match["unit"] == "steps":
                    worst_steps = max(worst_steps, again)
                else:
                    worst_responses = max(worst_responses, again)
                print(f"         {match['what']}: {match['kept']} {match['unit']} kept, {again} lost", flush=True)
            if killed:
                done += 1
                pending.append(done)
            if code == 0:
                break
            if killed is None:
                print(text[-4000:])
                print(f"attempt {attempts} failed although nobody was killed", flush=True)
                return 1
            if not wait_for_orphan:
                unexpected = [line for line in text.splitlines() if line.startswith("rlhf: error:") and "damaged" in line]
                assert not unexpected, unexpected
        same = manifests(folder) == expected
        equal += same
        print(f"run {runs} is complete after kills {pending}: {'equal' if same else 'NOT EQUAL'}", flush=True)
        pending.clear()
    print(f"{done} kills, {runs} runs, {equal} with the manifests of the undisturbed run")
    print(f"most lost in one kill: {worst_steps} training steps, {worst_responses} responses (an engine works at {AT_A_TIME})")
    return 0 if equal == runs and worst_steps <= SAVE_EVERY and worst_responses <= AT_A_TIME else 1


def strike(world: World, process: subprocess.Popen, log: Path, rng: random.Random, number: int) -> str | None:
    """Wait a random time, kill a random process, say so; None when the run ended before."""
    until = time.monotonic() + rng.uniform(0.5, 9.0)
    kind = rng.choice(list(VICTIMS))
    while time.monotonic() < until:
        if process.poll() is not None:
            return None
        time.sleep(0.05)
    limit = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < limit:
        if found := world.processes().get(kind):
            victim = rng.choice(found)
            what = doing(log)
            try:
                world.kill(kind, victim)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue  # it ended between being found and being killed
            print(f"kill {number:3}: {kind} during {what}", flush=True)
            return kind
        time.sleep(0.05)
    return None


if __name__ == "__main__":
    sys.exit(main())
