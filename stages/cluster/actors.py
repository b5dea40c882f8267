"""The register of our warm actors: detached, named, in one namespace, each able to say what it holds."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from stages.cluster.placement import release
from stages.cluster.processes import memory_mb
from stages.errors import UserError

CONCURRENCY_GROUPS = {"control": 2}
ROOT = str(Path(__file__).parents[2])


class Resident:
    """What every actor class of ours inherits: it knows what it holds, and answers `describe` while it works.

    Ray runs each concurrency group of an actor in threads of its own. Methods marked for the group "control", as
    `describe` is, therefore answer while a method without a mark (they run one at a time, in order) is busy::

        class Engine(Resident):
            def __init__(self, *, code_id):
                super().__init__(role="engine", code_id=code_id)

            def generate(self, ...):                          # one at a time
                with self.working("generate"):
                    ...

            @ray.method(concurrency_group="control")          # answers at any time
            def progress(self): ...

        engine = get_or_create("engine-0", Engine, code_id=code_id, options={"num_cpus": 1}, kwargs={"code_id": code_id})

    `get_or_create` passes CONCURRENCY_GROUPS to Ray; without it the marks are errors. Because of the groups, unmarked
    methods run in one thread that is not the main one (`__init__` runs in the main thread).
    """

    def __init__(self, *, role: str, code_id: str) -> None:
        self.role, self.code_id = role, code_id
        self.holds: dict[str, str] = {}
        """slot (policy, critic, ...) -> state_id of the artifact whose weights are in it"""
        self.since = time.time()
        self.busy = ""

    def hold(self, slot: str, state_id: str) -> None:
        """Record that `slot` now holds the state of this id."""
        # A new dict each time: `describe` reads it from another thread.
        self.holds, self.since = self.holds | {slot: state_id}, time.time()

    def release(self, slot: str) -> None:
        """Record that `slot` holds nothing usable; to be called before the weights in it change."""
        self.holds = {name: held for name, held in self.holds.items() if name != slot}
        self.since = time.time()

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show `what` as busy for the time of the block."""
        before, self.busy = self.busy, what
        try:
            yield
        finally:
            self.busy = before

    @ray.method(concurrency_group="control")
    def describe(self) -> dict[str, Any]:
        """role, holds, since (seconds since the epoch), node, pid, memory_mb (RSS), code_id, busy ("" when idle)."""
        return {
            "role": self.role,
            "holds": dict(self.holds),
            "since": self.since,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "memory_mb": memory_mb(),
            "code_id": self.code_id,
            "busy": self.busy,
        }


def actor_name(name: str, code_id: str) -> str:
    """The name in the namespace: two versions of the code never share an actor."""
    return f"{name}-{code_id[:12]}"


def get_or_create(
    name: str,
    cls: type,
    *,
    code_id: str,
    options: dict[str, Any] | None = None,
    args: tuple = (),
    kwargs: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    wait_s: float = 60.0,
    before: Callable[[], None] = lambda: None,
) -> "ray.actor.ActorHandle":
    """The live detached actor `name` of this code, or a new one of class `cls` (a plain class that inherits Resident).

    It is never restarted by Ray: a restarted actor would be empty without anybody noticing. env: variables of its
    process. wait_s: how long resources held by others may keep it waiting. before: called before a new one is made.
    Raises UserError, saying what is wanted and what is free, when the cluster cannot place it.
    """
    full = actor_name(name, code_id)
    try:
        return ray.get_actor(full)
    except ValueError:
        pass
    before()
    options = {"num_cpus": 0} | (options or {})
    if "scheduling_strategy" not in options:
        require_resources(_wanted(options), who=full, wait_s=wait_s)
    return (
        ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(cls)
        .options(
            name=full,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            max_task_retries=0,
            runtime_env={"env_vars": {"PYTHONPATH": ROOT} | (env or {})},
            **options,
        )
        .remote(*args, **(kwargs or {}))
    )


def require_resources(wanted: dict[str, float], *, who: str, wait_s: float = 60.0) -> None:
    """Wait until one node has `wanted` free. UserError at once when no node is so large, and after `wait_s` else."""
    if not wanted:
        return
    limit = time.monotonic() + wait_s
    while True:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if not any(all(node["Resources"].get(kind, 0) >= amount for kind, amount in wanted.items()) for node in nodes):
            largest = {kind: max((node["Resources"].get(kind, 0) for node in nodes), default=0) for kind in wanted}
            raise UserError(f"hardware: {who} wants {_say(wanted)} on one node, the largest has {_say(largest)}; ask for less")
        free = ray.available_resources()
        if all(free.get(kind, 0) >= amount for kind, amount in wanted.items()):
            return
        if time.monotonic() > limit:
            free = {kind: free.get(kind, 0) for kind in wanted}
            raise UserError(f"hardware: {who} wants {_say(wanted)}, free are {_say(free)}; see `rlhf cluster status`, ask for less")
        time.sleep(0.2)


def _wanted(options: dict[str, Any]) -> dict[str, float]:
    wanted = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
    return {kind: float(amount) for kind, amount in wanted.items() if amount}


def _say(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def list_residents(*, timeout_s: float = 5.0) -> list[dict[str, Any]]:
    """`describe()` of every live named actor of the namespace, plus its name; one that does not answer in time says so."""
    calls = {}
    for name in sorted(ray.util.list_named_actors()):
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(name)
            if hasattr(actor, "describe"):
                calls[actor.describe.remote()] = name
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    rows = []
    for call, name in calls.items():
        row: dict[str, Any] = {"name": name, "role": name, "holds": {}, "since": None, "node": "", "pid": 0, "memory_mb": 0.0}
        row |= {"code_id": "", "busy": f"no answer in {timeout_s:g} s"}
        if call in ready:
            try:
                row |= ray.get(call)
            except ray.exceptions.RayActorError:
                continue
            except ray.exceptions.RayError as error:
                row["busy"] = f"failed: {str(error).splitlines()[0][:80]}"
        rows.append(row)
    return rows


def kill_residents(code_id: str) -> int:
    """End every actor of ours that was made for this code, our own process excepted. Returns how many."""
    ended = 0
    for row in list_residents(timeout_s=3.0):
        if row["code_id"] == code_id and row["pid"] != os.getpid():
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(row["name"]))
                ended += 1
    release(code_id)
    return ended
