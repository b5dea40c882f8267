"""Every command that README shows is one that works."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from stages import config_check, configuration, plan, targets

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SECTION = re.search(r"## Caching, resuming, sharing\n(.*?)\n## ", TEXT, re.DOTALL)[1]


def commands(text: str, first: str) -> list[str]:
    return [line.split("#")[0].strip() for line in text.splitlines() if re.match(rf"    ({first}) ", line)]


COMMANDS = commands(TEXT.replace(SECTION, ""), "snakemake|make|rlhf")


def test_readme_shows_the_two_commands_and_the_targets():
    assert {"make ppo_final", "make test"} <= set(COMMANDS)
    assert any(c.startswith("snakemake") and c.endswith(" compare") for c in COMMANDS)


def test_the_configuration_of_ones_own_is_one_that_plans(tmp_path):
    """README's example, merged over the default as snakemake would, with its data file there."""
    (example,) = re.findall(r"## Your own\n\n((?:    .*\n|\n)+)", TEXT)
    (tmp_path / "my.yaml").write_text(textwrap.dedent(example))
    for file in re.findall(r"source: ([\w./]+)", example):
        (tmp_path / file).write_text('{"question": "q", "answer": "a"}\n')
    for file in re.findall(r"([\w./]+\.py):", example):
        (tmp_path / file).write_text("")
    planned = plan.Plan(config_check.load(configuration.merged([tmp_path / "my.yaml"])), tmp_path)
    assert planned.final["base"].stage == "import" and planned.final["careful"].stage == "update"


@pytest.mark.parametrize("preset", sorted((ROOT / "config/presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_one_that_plans(preset):
    assert targets.targets(plan.Plan(config_check.load(configuration.merged([preset])), ROOT))


@pytest.mark.parametrize("sweep", sorted((ROOT / "config/sweeps").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sweep_is_one_that_plans(sweep):
    assert sweep.stem in targets.targets(plan.Plan(config_check.load(configuration.merged([sweep])), ROOT))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_readme_is_understood(command, tmp_path):
    """Targets are planned, not run: test_ppo_final runs them. The environment's own folder comes first on PATH."""
    words = {"snakemake": f"{command} -n", "make": command.replace("make", "make -n", 1), "rlhf": command}[command.split()[0]]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RLHF_STATE_DIR": str(tmp_path)}
    done = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 or done.stdout.startswith("no cluster runs"), done.stdout[-1500:] + done.stderr[-1500:]


def test_the_commands_on_caching_and_sharing_do_what_is_said_in_their_order(cluster, tmp_path):
    """Run as they stand, in a copy of this checkout whose default configuration is the small world's."""
    copy = tmp_path / "clone"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for file in tracked:
        if (ROOT / file).is_file() and not file.startswith("data/checkpoints/"):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
    small = configuration.merged([ROOT / "config/presets/tiny.yaml"])
    (copy / "config/config.yaml").write_text(yaml.safe_dump(small, sort_keys=False))
    subprocess.run("git init -q && git add -A && git -c user.name=t -c user.email=t@t commit -qm all", shell=True, cwd=copy, check=True)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(copy), "RLHF_STATE_DIR": cluster, "COLUMNS": "200",
    }  # fmt: skip

    def run(command: str) -> str:
        done = subprocess.run(command, shell=True, cwd=copy, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    run("snakemake --cores all ppo_final")
    said = {command: run(command) for command in commands(SECTION, "snakemake|rlhf|dvc|rm")}
    expected = {
        "rm -rf results": "Nothing to be done", "snakemake -n": "to compute",
        "rlhf explain ppo --set": "seed 0 -> 1", "rlhf lineage": "corpus-",
        "dvc push": "pushed", "dvc status": "up to date", "rlhf verify": "objects are whole", "rlhf gc": "optimizer states",
        "snakemake --cores all kl_coef": "kl_coef-0.2", "rlhf explain ppo kl_coef": "kl_coef: 0.06 -> 0.2", "rlhf freeze": "artifacts",
        "rlhf rerun": "with the same key and the same bytes",
    }  # fmt: skip
    for start, words in expected.items():
        (command,) = [c for c in said if c.startswith(start)]
        assert words in said[command], f"{command}\n{said[command][-2000:]}"

    loss = copy / "stages/algorithms/ppo.py"
    code = loss.read_text()
    plan_of = lambda: run("snakemake -n --cores all ppo_final")
    loss.write_text("# a comment\n" + code.replace('"""Losses of proximal', '"""The losses of proximal'))
    assert "0 to compute" in plan_of()
    loss.write_text(code.replace("_LARGEST_LOG_RATIO = 20.0", "_LARGEST_LOG_RATIO = 19.0"))
    edited = plan_of()
    assert "code changed: stages.algorithms.ppo)" in edited
    assert not re.findall(r"^Job \d+: (?:data|pretrain|sft|reward model) ", edited, re.MULTILINE)  # what does not use it
    loss.write_text(code)
    assert "0 to compute" in plan_of()
