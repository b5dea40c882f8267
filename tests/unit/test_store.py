"""The store and the runner, with small stages in place of training ones; the DVC repository is real."""

import json
import subprocess
import sys
import threading

import pytest

from stages import fingerprint, manifest, plan, runner
from stages.errors import UserError
from stages.store import open_store

COUNT = {"runs": 0}
CODE = fingerprint.fingerprint("tests.unit.small_stage")


@pytest.fixture
def root(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "-q"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-m", "dvc", "config", "cache.type", "hardlink,copy"], cwd=tmp_path, check=True)
    monkeypatch.setitem(plan.STAGES, "write", plan.Stage("tests.unit.small_stage", 1, ("out.txt",)))
    monkeypatch.setattr(runner, "_warm_up", lambda context: None)
    COUNT["runs"] = 0
    return tmp_path


def job(text="hello", out="results/store/a", **inputs):
    params = {"text": text}
    return {"stage": "write", "version": 1, "model": "a", "params": params, "plan": plan.short_hash(params), "code": CODE,
            "inputs": inputs, "out": out, "hints": {}}  # fmt: skip


def run(root, made):
    return runner.run_job(made, {"code_id": "x"}, str(root), lambda event: None, threading.Event())


def test_a_job_is_computed_once_and_then_restored(root):
    assert run(root, job())["status"] == "computed"
    first = (root / "results/store/a/manifest.json").read_bytes()
    import shutil

    shutil.rmtree(root / "results")
    assert run(root, job())["status"] == "restored"
    assert (root / "results/store/a/manifest.json").read_bytes() == first
    assert (root / "results/store/a/out.txt").read_text() == "hello"


def test_another_parameter_is_another_result_and_going_back_restores(root):
    run(root, job("one"))
    assert run(root, job("two"))["status"] == "computed"
    assert (root / "results/store/a/out.txt").read_text() == "two"
    assert run(root, job("one"))["status"] == "restored"
    assert (root / "results/store/a/out.txt").read_text() == "one"


def test_a_changed_input_changes_the_key(root):
    run(root, job("one", out="results/store/in"))
    key = run(root, job("x", input="results/store/in"))["key"]
    run(root, job("two", out="results/store/in"))
    assert run(root, job("x", input="results/store/in"))["key"] != key


def test_a_flipped_byte_in_the_cache_is_found_quarantined_and_recomputed(root):
    run(root, job("a text that is long enough"))
    store = open_store(str(root))
    digest = next(iter(json.loads((root / "results/store/a/manifest.json").read_text())["outputs"].values()))["sha256"]
    (victim,) = [p for p in (root / ".dvc/cache/files").rglob("*") if p.is_file() and manifest.hash_file(p) == digest]
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[3] ^= 1
    victim.write_bytes(data)
    assert run(root, job("a text that is long enough"))["status"] == "computed"
    assert (root / "results/store/a/out.txt").read_text() == "a text that is long enough"
    assert list((store.records.parent / "quarantine").iterdir())


def test_a_failed_stage_leaves_nothing_where_others_look(root):
    with pytest.raises(UserError, match="says no"):
        run(root, job("fail"))
    assert not (root / "results/store/a").exists()


def test_a_stage_that_writes_too_little_is_an_error(root):
    with pytest.raises(RuntimeError, match=r"did not write out\.txt"):
        run(root, job("nothing"))


def test_a_missing_input_is_named(root):
    with pytest.raises(UserError, match=r"results/store/none/manifest\.json: missing"):
        run(root, job(input="results/store/none"))


def test_two_runs_of_one_key_at_once_compute_it_once(root):
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(root, job("slow"))["status"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["computed", "restored", "restored"]


def test_too_little_disk_space_is_said_before_any_work(root, monkeypatch):
    import shutil
    from collections import namedtuple

    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total used free")(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(UserError, match="disk space left"):
        run(root, job())
    assert not (root / "results/store/a").exists()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_training_wants_room_for_weights_optimizer_and_saved_state_of_all_that_it_trains(root, monkeypatch, dtype):
    import shutil
    from collections import namedtuple

    import numpy as np
    from safetensors.numpy import save_file

    for folder in ("actor/model", "update/model", "update/critic"):
        (root / "results/store" / folder).mkdir(parents=True)
        for part in ("1", "2"):
            save_file({"w": np.zeros((500, 1000), dtype)}, root / "results/store" / folder / f"model-{part}.safetensors")

    def wanted(inputs, iteration=1, **hints):
        """Bytes from which on the job may start."""
        job = {"model": "m", "hints": hints, "inputs": inputs, "params": {"iteration": iteration}}
        low, high = 0, 2**30
        while low < high:
            free = (low + high) // 2
            monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: namedtuple("usage", "total used free")(2**40, 0, free))
            try:
                runner._check_disk(root, job, root / "results/work/state")
                high = free
            except UserError:
                low = free + 1
        return low - 64 * 2**20

    base, update = "results/store/actor", "results/store/update"
    assert wanted({"base": base}, save_every=100) == 26_000_000
    assert wanted({"actor": update, "critic": update}, iteration=2, save_every=100) == 52_000_000
    assert wanted({"actor": base, "critic": base}, save_every=100) == 52_000_000
    (root / "results/work/state/actor/step-00000002").mkdir(parents=True)
    (root / "results/work/state/actor/step-00000002/weights.safetensors").write_bytes(bytes(4_000_000))
    assert wanted({"actor": base, "critic": base}, save_every=100) == 48_000_000, "a saved state is there already"
    assert wanted({"policy": base}) == 0, "what trains nothing writes no weights"
