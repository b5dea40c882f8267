"""One algorithm for every stage: key, lock, restore or compute in a private folder, hash, store, rename into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from stages import fingerprint, locks, manifest, plan
from stages.errors import UserError
from stages.keys import run_key
from stages.store import Store, open_store

WORK = "results/work"
_PATIENCE_S = 10.0
Emit = Callable[[dict[str, Any]], None]


class Cancelled(Exception):
    """The client went away; resumable state has been saved."""


class Context:
    """What a stage is given: its parameters, inputs, an empty `out` folder, a `state` folder that survives, the cluster."""

    def __init__(self, job: dict, runtime: dict, root: Path, key: str, emit: Emit, cancelled: threading.Event, inputs: dict[str, dict]):
        self.job, self.runtime, self.root, self.key = job, runtime, root, key
        self.params: dict[str, Any] = job["params"]
        self.hints: dict[str, Any] = dict(job["hints"])
        self.model: str = job["model"]
        self.work = root / WORK / key
        self.out, self.state = self.work / "out", self.work / "state"
        self.cancelled = cancelled
        self.phases: dict[str, float] = {}
        self.info: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        """Deterministic findings for the manifest: counts, statistics."""
        self.warm_roles: tuple[str, ...] = ()
        self._emit, self._inputs = emit, inputs

    def input(self, name: str) -> Path:
        return self.root / self.job["inputs"][name]

    def model_folder(self, name: str, role: str = "actor") -> Path:
        """The folder with the weights of an input artifact."""
        return self.root / plan.model_folder(self.job["inputs"][name], role)

    def state_id(self, name: str, role: str = "actor") -> str:
        """The name under which warm processes hold an input's weights: its content, so never a stale one."""
        return _state_id(self.job["inputs"][name], role, self._inputs[name]["content"])

    def keep_warm(self, *roles: str) -> None:
        """What the trainers hold for these roles is what this artifact will be, once it is published."""
        self.warm_roles += roles

    @contextlib.contextmanager
    def phase(self, name: str):
        """Time a phase: generation, weight sync, logits and rewards, training, or anything else."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def progress(self, phase: str, done: int, total: int, unit: str = "step", tokens_per_s: float | None = None, **metrics):
        self._emit(
            {"event": "progress", "phase": f"{self.model} {phase}", "done": done, "total": total, "unit": unit,
             "tokens_per_s": tokens_per_s, "metrics": metrics}
        )  # fmt: skip

    def log(self, message: str) -> None:
        self._emit({"event": "log", "message": f"{self.model}: {message}"})

    def resumed(self, what: str, kept: int, again: int, unit: str) -> None:
        """Say, and keep for run_info.json, that interrupted work goes on: `kept` units are there, `again` were lost."""
        self.log(f"{what} goes on after {kept} {unit}; {again} lost with the interrupted run")
        with (self.state / "resumed.jsonl").open("a") as file:
            file.write(json.dumps({"what": what, "kept": kept, "again": again, "unit": unit, "time": time.time()}) + "\n")

    def resumptions(self) -> list[dict[str, Any]]:
        path = self.state / "resumed.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def check_code(self) -> None:
        """Before new processes import our code: it must still be what this run began with."""
        if fingerprint.code_id() != self.runtime["code_id"]:
            raise UserError("the code was edited while the run went on; run the same command again")

    def check(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled()

    @cached_property
    def cluster(self):
        from stages.cluster.groups import Groups

        return Groups(self)


def _state_id(path: str, role: str, content: str) -> str:
    return f"{path}:{role}:{content[:16]}"


def put_in_place(root: Path, job: dict, key: str, store: Store) -> bool:
    """Link a stored result to where the workflow looks; False when it is not whole in the store."""
    with locks.one_at_a_time(root, key):
        return _put_in_place(root, job, key, store, time.time())


def _put_in_place(root: Path, job: dict, key: str, store: Store, started: float) -> bool:
    work = root / WORK / key
    made = store.restore(key, work / "restored")
    if made is None:
        return False
    computed = (store.record(key) or {}).get("info")
    info = {"status": "restored", "started": started, "finished": time.time(), "phases": {}, "computed": computed}
    _publish(work / "restored", root / job["out"], manifest.of_job(made, job), info, work)
    return True


def run_job(job: dict, runtime: dict, cwd: str, emit: Emit, cancelled: threading.Event) -> dict[str, Any]:
    """Make the artifact that a job names, or restore it. Returns {status: computed | restored, seconds, key}.

    Raises UserError for what the user can mend; nothing of a failed run is left where others look.
    """
    began, started = time.perf_counter(), runtime.get("started") or time.time()
    root = Path(cwd)
    _check_code(job)
    inputs = {name: _wait_for(root / path, cancelled) for name, path in job["inputs"].items()}
    key, parts = run_key(job, {name: made["content"] for name, made in inputs.items()})
    work, target = root / WORK / key, root / job["out"]
    try:
        with _locked(root, key, emit, cancelled):
            store = open_store(str(root))
            if _put_in_place(root, job, key, store, started):
                return {"status": "restored", "seconds": time.perf_counter() - began, "key": key}
            while store.quarantined:
                emit({"event": "log", "message": f"damaged: {store.quarantined.pop()}; it is made again"})
            context = Context(job, runtime, root, key, emit, cancelled, inputs)
            shutil.rmtree(context.out, ignore_errors=True)
            _free_earlier(context)
            _check_disk(root, job, context.state)
            _warm_up(context)
            context.out.mkdir(parents=True)
            context.state.mkdir(exist_ok=True)
            importlib.import_module(plan.STAGES[job["stage"]].module).run(context)
            with context.phase("writing"):
                missing = [name for name in plan.STAGES[job["stage"]].outputs if not (context.out / name).is_file()]
                if missing:
                    raise RuntimeError(f"stage {job['stage']} did not write {', '.join(missing)}")
                for name, path in job["inputs"].items():
                    if _wait_for(root / path, cancelled)["content"] != inputs[name]["content"]:
                        raise UserError(f"{path}: replaced by another run while {job['out']} was made from it; run the same command again")
                made = _manifest(job, key, parts, inputs, context)
                info = {
                    "status": "computed", "started": started, "finished": time.time(), "host": socket.gethostname(),
                    "phases": context.phases, "resumed": context.resumptions(), **context.info,
                }  # fmt: skip
                store.put(key, context.out, made, info)
            info["finished"] = time.time()
            _publish(context.out, target, made, info, work)
            for role in context.warm_roles:
                context.cluster.rename(role, _state_id(job["out"], role, made["content"]))
            return {"status": "computed", "seconds": time.perf_counter() - began, "key": key}
    except (UserError, Cancelled):
        raise
    except Exception as error:
        # libraries say it in many ways (sqlite: "database or disk is full"); on a full disk, that is what is the matter
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or shutil.disk_usage(root).free < 2**20:
            raise UserError(f"{root / 'results'}: no disk space left; free some and run the same command again") from None
        raise


def load() -> None:
    """Import what stages run, and take its fingerprints, at once: what is edited later is neither run nor believed."""
    for stage in plan.STAGES.values():
        importlib.import_module(stage.module)
        fingerprint.fingerprint(*stage.code)


def _check_code(job: dict) -> None:
    """What this process has imported is what the job's key says."""
    if not job["code"].startswith("version ") and job["code"] != fingerprint.fingerprint(*plan.STAGES[job["stage"]].code):
        raise UserError(f"{job['out']}: the code was edited while the run went on; run the same command again")


def _wait_for(artifact: Path, cancelled: threading.Event) -> dict[str, Any]:
    """The manifest of an input. Another Snakemake that makes the same artifact takes it away for a moment."""
    limit = time.monotonic() + _PATIENCE_S
    while not (artifact / manifest.NAME).exists() and time.monotonic() < limit and not cancelled.wait(0.1):
        pass
    return manifest.read(artifact)


def _manifest(job: dict, key: str, parts: dict, inputs: dict[str, dict], context: Context) -> dict[str, Any]:
    outputs = manifest.hash_tree(context.out)
    return {
        "key": key,
        "stage": job["stage"],
        "model": job["model"],
        "plan": job["plan"],
        "version": job["version"],
        "code": job["code"],
        "modules": {name: digest[:12] for name, digest in fingerprint.modules(*plan.STAGES[job["stage"]].code).items()},
        "packages": parts["packages"],
        "params": job["params"],
        "inputs": {n: {"path": job["inputs"][n], "key": i["key"], "content": i["content"]} for n, i in inputs.items()},
        "facts": context.facts,
        "outputs": outputs,
        "content": hashlib.sha256(plan.canonical([outputs, context.facts]).encode()).hexdigest(),
    }


def _publish(folder: Path, target: Path, made: dict, info: dict, work: Path) -> None:
    """Complete a folder with run_info.json and, last, manifest.json, and rename it to where the workflow looks."""
    written = {name: (folder / name).stat().st_mtime_ns for name in made["outputs"] if (folder / name).exists()}
    manifest.write_json(folder / "run_info.json", info | {"written": written})
    manifest.write_json(folder / manifest.NAME, made)
    target.parent.mkdir(parents=True, exist_ok=True)
    old = work / f"replaced-{os.getpid()}"
    place = hashlib.sha256(str(target).encode()).hexdigest()[:32]
    with locks.one_at_a_time(work.parents[2], place):
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        folder.rename(target)
    shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path, key: str, emit: Emit, cancelled: threading.Event):
    """A place among those who use the project, and the lock of a run key; a client waits for them while it is there."""

    def give_up() -> None:
        if cancelled.is_set():
            raise Cancelled()

    say = lambda why: lambda: emit({"event": "log", "message": f"waiting: {why}"})
    with (
        locks.shared(root, say("`rlhf gc` is freeing results here"), give_up),
        locks.one_at_a_time(root, key, say(f"another run is making the same artifact ({key[:8]})"), give_up),
    ):
        yield


_warmed: set[str] = set()


def _warm_up(context: Context) -> None:
    """Start trainers and engines beside the first stage that computes anything: their imports take longer than it."""
    if context.runtime["code_id"] in _warmed:
        return
    _warmed.add(context.runtime["code_id"])
    from stages.cluster.groups import Groups

    threading.Thread(target=Groups(context).warm_up, daemon=True).start()


_BYTES_A_PARAMETER = 26
"""Of a training, the most: weights 4, the optimizer's moments 8, a saved state 12; in bfloat16 2, with masters 12, and 12."""


def _free_earlier(context: Context) -> None:
    """Optimizer states that the model's configuration does not keep. What stands in the way of that is said, and costs only space."""
    keep = context.hints.pop("keep_optimizers", None)
    if keep is None or "previous" not in context.job["inputs"]:
        return
    from stages import upkeep

    with context.phase("writing"):
        try:
            upkeep.trim(context.root, context.input("previous"), keep)
        except (UserError, OSError) as error:
            context.log(f"optimizer states of earlier iterations were not freed: {error}")


def _check_disk(root: Path, job: dict, state: Path) -> None:
    """Room for what is written at all, and for what a training leaves and needs meanwhile, judged by the models that it starts from.

    A state that an interrupted run has saved is there already.
    """
    parameters = 0
    for role in ("base", "actor", "critic") if "save_every" in job["hints"] else ():
        if path := job["inputs"].get(role):
            own = "critic" if role == "critic" and job["params"]["iteration"] > 1 else "actor"
            parameters += sum(map(_parameters, (root / plan.model_folder(path, own)).glob("*.safetensors")))
    saved = sum(path.stat().st_size for path in state.rglob("step-*/*.safetensors"))
    wanted = 64 * 2**20 + max(0, _BYTES_A_PARAMETER * parameters - saved)
    free = shutil.disk_usage(root).free
    if free < wanted:
        raise UserError(
            f"{root / 'results'}: {free >> 20} MB of disk space left, {wanted >> 20} MB wanted for {job['model']}; free some and run again"
        )


def _parameters(path: Path) -> int:
    """Numbers in a safetensors file, as its header says."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
