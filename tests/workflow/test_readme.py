"""Every command that README shows is one that works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = [
    line.split("#")[0].strip() for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"    (snakemake|make|rlhf) ", line)
]


def test_readme_shows_the_two_commands_and_the_targets():
    assert {"make ppo_final", "make test"} <= set(COMMANDS)
    assert any(c.startswith("snakemake") and c.endswith(" compare") for c in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_readme_is_understood(command, tmp_path):
    """Targets are planned, not run: test_ppo_final runs them. The environment's own folder comes first on PATH."""
    words = {"snakemake": f"{command} -n", "make": command.replace("make", "make -n", 1), "rlhf": command}[command.split()[0]]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RLHF_STATE_DIR": str(tmp_path)}
    done = subprocess.run(words, shell=True, cwd=ROOT, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 or done.stdout.startswith("no cluster runs"), done.stdout[-1500:] + done.stderr[-1500:]
