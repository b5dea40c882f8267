"""A disk that fills up in the middle of a run, at ten different points, on a file system that is really full."""

import os
import subprocess
import time

import pytest

POINTS = (1, 2, 4, 6, 7, 8, 9, 11, 13, 15)
"""The disk fills when so many artifacts are there; each time it is freed and the same command goes on."""


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path):
    with path.open("wb", buffering=0) as file:
        for block in (2**20, 2**12, 1):
            try:
                while True:
                    file.write(b"0" * block)
            except OSError:
                continue


def test_a_full_disk_is_said_in_a_clear_line_loses_nothing_and_the_run_completes_after_it_is_freed(small_disk, new_project, project_at):
    expected = new_project()
    expected.run("ppo_final")
    project = project_at(small_disk / "project")
    kept: dict[str, str] = {}
    for artifacts in POINTS:
        running = subprocess.Popen(
            project.command("ppo_final"), cwd=project.folder, env=project.environment, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while running.poll() is None and len(project.manifests()) < artifacts:
            time.sleep(0.02)
        fill(small_disk / "filler")
        said, _ = running.communicate()
        lines = [line for line in said.splitlines() if line.startswith("rlhf: error:")]
        assert running.returncode != 0 and lines, said[-3000:]
        assert all("disk space" in line for line in lines), "\n".join(lines)
        (small_disk / "filler").unlink()
        assert kept.items() <= project.manifests().items()
        kept = project.manifests()
    project.run("ppo_final")
    assert project.manifests() == expected.manifests()
