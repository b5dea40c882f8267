"""A project on a small world and a cluster of the tests' own, shared by all tests that run the workflow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = ROOT / "config" / "presets" / "tiny.yaml"


class Project:
    """A working folder of its own; the code is this checkout's, so that all folders share its warm processes."""

    def __init__(self, folder: Path, state: str):
        self.folder, self.environment = folder, os.environ | {"RLHF_STATE_DIR": state}
        folder.mkdir()
        subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=folder, check=True)
        subprocess.run([sys.executable, "-m", "dvc", "config", "cache.type", "hardlink,copy"], cwd=folder, check=True)

    config = TINY

    def command(self, *arguments: str, files=()) -> list[str]:
        return [
            sys.executable, "-m", "snakemake", "-s", str(ROOT / "workflow" / "Snakefile"), "--directory", str(self.folder),
            "--workflow-profile", str(ROOT / "workflow" / "profiles" / "default"), "--cores", "all", *arguments,
            "--configfile", str(TINY), *map(str, files),
        ]  # fmt: skip

    def rlhf(self, *arguments: str, ok: bool = True) -> subprocess.CompletedProcess:
        """The `rlhf` command in this folder."""
        done = subprocess.run(
            [sys.executable, "-m", "stages", *arguments],
            capture_output=True, text=True, cwd=self.folder, stdin=subprocess.DEVNULL,
            env=self.environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        )  # fmt: skip
        if ok and done.returncode:
            pytest.fail(f"rlhf {' '.join(arguments)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done

    def run(self, *arguments: str, ok: bool = True, files=()) -> subprocess.CompletedProcess:
        done = subprocess.run(
            self.command(*arguments, files=files),
            capture_output=True,
            text=True,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            env=self.environment,
        )
        if ok and done.returncode:
            pytest.fail(f"snakemake {' '.join(arguments)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    def manifests(self) -> dict[str, str]:
        store = self.folder / "results" / "store"
        return {str(p.relative_to(store)): p.read_text() for p in sorted(store.rglob("manifest.json"))}

    def statuses(self) -> dict[str, str]:
        store = self.folder / "results" / "store"
        return {str(p.parent.relative_to(store)): json.loads(p.read_text())["status"] for p in sorted(store.rglob("run_info.json"))}

    def written(self) -> list[Path]:
        """What a user would find: artifacts, reports and pointers."""
        return sorted(p for part in ("results/store", "results/report", "data") for p in (self.folder / part).rglob("*"))

    def artifact(self, pattern: str) -> Path:
        (found,) = (self.folder / "results" / "store").glob(pattern)
        return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A cluster of these tests' own, ended afterwards."""
    state = str(tmp_path_factory.mktemp("state"))
    yield state
    subprocess.run([sys.executable, "-m", "stages", "cluster", "down"], cwd=ROOT, check=True, env=os.environ | {"RLHF_STATE_DIR": state})


@pytest.fixture(scope="session")
def new_project(cluster, tmp_path_factory):
    """Makes an empty project; called once for each that a test wants."""
    return lambda: Project(tmp_path_factory.mktemp("folder") / "project", cluster)


@pytest.fixture(scope="session")
def project_at(cluster):
    """Makes an empty project in a folder of the test's choice."""
    return lambda folder: Project(folder, cluster)


@pytest.fixture(scope="session")
def project(new_project):
    """ppo_final from an empty folder; later tests look at what it left and go on from it."""
    made = new_project()
    made.output = made.run("ppo_final")
    return made
