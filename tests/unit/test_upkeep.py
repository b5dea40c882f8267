"""Optimizer states that are freed while a run goes on: only those, and only where nobody else needs them."""

import json
import subprocess
import sys

import pytest
import yaml

from stages import locks, manifest, upkeep
from stages.errors import UserError
from stages.store import Store, open_store


@pytest.fixture
def root(tmp_path):
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def run_of(root, model="ppo", iterations=4, keys="k"):
    """Iterations of a run, in place and in the store; returns their folders, the first first."""
    folders, previous = [], {}
    for k in range(1, iterations + 1):
        folder = root / f"results/store/{model}/{k:04d}/update"
        (folder / "optimizer").mkdir(parents=True)
        (folder / "optimizer/actor.safetensors").write_text(f"optimizer {k}")
        (folder / "weights").write_text(f"weights {k}")
        made = {
            "key": f"{keys}{k}" * 8, "model": model, "stage": "update", "inputs": previous, "content": str(k),
            "outputs": {n: {"sha256": manifest.hash_file(folder / n), "size": (folder / n).stat().st_size}
                        for n in ("optimizer/actor.safetensors", "weights")},
        }  # fmt: skip
        open_store(str(root)).put(made["key"], folder, made, {})
        manifest.write_json(folder / manifest.NAME, made)
        previous = {"previous": {"path": str(folder.relative_to(root)), "key": made["key"], "content": str(k)}}
        folders.append(folder)
    return folders


def whole(folders):
    return [k for k, folder in enumerate(folders, 1) if (folder / "optimizer/actor.safetensors").exists()]


def restorable(root, folders):
    """Those whose optimizer state the store has."""
    store = Store(root)
    records = [store.record(manifest.read(folder)["key"])["files"] for folder in folders]
    return [k for k, files in enumerate(records, 1) if "optimizer/actor.safetensors" in files and not store.lacks(files.values())]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [3, 4]), (4, [1, 2, 3, 4]), (9, [1, 2, 3, 4])])
def test_the_newest_are_kept_and_of_the_others_nothing_but_the_optimizer_goes(root, keep, left):
    folders = run_of(root)
    upkeep.trim(root, folders[-1], keep)
    assert whole(folders) == restorable(root, folders) == left
    assert all((folder / "weights").read_text() for folder in folders)
    assert len(Store(root).objects()) >= 4 + len(left)
    assert not Store(root).lacks(o for _, r in Store(root).all_records() for o in r["files"].values())


def test_what_a_kill_left_half_done_is_done_the_next_time(root):
    folders = run_of(root)
    store = Store(root)
    key = manifest.read(folders[0])["key"]
    record = store.record(key)
    store.replace(key, record | {"files": {"weights": record["files"]["weights"]}})
    upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == [4]


def test_what_a_pointer_names_stays(root):
    folders = run_of(root)
    (root / "data/checkpoints").mkdir(parents=True)
    pointer = {"outs": [{"md5": "0" * 32, "path": "x"}], "meta": {"run_key": manifest.read(folders[1])["key"]}}
    (root / "data/checkpoints/ppo.dvc").write_text(yaml.safe_dump(pointer))
    upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == restorable(root, folders) == [2, 4]


def test_an_object_that_another_result_has_too_stays_for_that(root):
    one, other = run_of(root), run_of(root, "other", keys="o")
    upkeep.trim(root, one[-1], 1)
    assert whole(one) == restorable(root, one) == [4]
    assert whole(other) == restorable(root, other) == [1, 2, 3, 4]


def test_what_another_job_is_at_waits_for_another_time(root):
    folders = run_of(root)
    with locks.one_at_a_time(root, manifest.read(folders[0])["key"]):
        upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == restorable(root, folders) == [1, 4]
    upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == [4]


def test_another_result_in_an_iterations_place_ends_the_search(root):
    folders = run_of(root)
    made = manifest.read(folders[1])
    manifest.write_json(folders[1] / manifest.NAME, made | {"key": "another"})
    upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == [1, 2, 4]


def test_in_a_cache_outside_of_the_project_nothing_is_freed(root, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    subprocess.run([sys.executable, "-m", "dvc", "cache", "dir", str(cache)], cwd=root, check=True, capture_output=True)
    folders = run_of(root)
    with pytest.raises(UserError, match="a cache outside of this project"):
        upkeep.trim(root, folders[-1], 1)
    assert whole(folders) == [1, 2, 3, 4]


def test_a_pointer_whose_files_are_elsewhere_does_not_stand_in_the_way_and_a_broken_one_is_named(root):
    folders = run_of(root)
    (root / "mine.dvc").write_text(json.dumps({"outs": [{"md5": "0" * 32 + ".dir", "path": "mine", "hash": "md5"}]}))
    upkeep.trim(root, folders[-1], 2)
    assert whole(folders) == [3, 4]
    (root / "dvc.yaml").write_text("stages: [half")
    with pytest.raises(UserError, match=r"dvc\.yaml"):
        upkeep.trim(root, folders[-1], 1)


def test_an_artifact_whose_optimizer_was_freed_can_be_taken_up_again_without_its_record(root):
    folders = run_of(root)
    upkeep.trim(root, folders[-1], 1)
    made = manifest.read(folders[0])
    Store(root).forget(made["key"])
    record = Store(root).adopt(folders[0], made)
    assert set(record["files"]) == {"weights"}
    assert Store(root).restore(made["key"], root / "again") == made
