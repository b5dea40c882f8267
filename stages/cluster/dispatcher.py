"""The detached actor that lives with the cluster and runs the jobs that thin clients send to its socket.

It holds the Ray connection and the imported code of one version, so a rule costs a socket call and not an `import ray`.
"""

import contextlib
import os
import sys
import threading
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stages.cluster import actors, head, paths
from stages.cluster.actors import Resident
from stages.cluster.ensure import ensure_dispatcher
from stages.cluster.server import serve
from stages.errors import UserError

__all__ = ["Dispatcher", "create", "ensure_dispatcher", "serve"]

FOREIGN_IDLE_S = 600.0
"""A dispatcher of another folder (a second clone) is only ended after so long without a job; one of our own at once."""


class Dispatcher(Resident):
    """Serves `runner.run_job` on `paths.socket_path(code_id, address)` from the moment it is made."""

    def __init__(self, *, code_id: str, address: str, idle_minutes: float) -> None:
        super().__init__(role="dispatcher", code_id=code_id)
        self.root, self.address, self.idle_minutes = actors.ROOT, address, idle_minutes
        self._server = serve(
            paths.socket_path(code_id, address),
            _run_job,
            code_id=code_id,
            status=actors.list_residents,
            down=self._down,
            activity=paths.touch_activity if paths.is_local(address) else lambda: None,
        )
        self.hold("socket", self._server.path)
        threading.Thread(target=_import_runner, daemon=True).start()
        if not paths.is_local(address) and idle_minutes:
            threading.Thread(target=self._end_when_idle, daemon=True).start()

    @ray.method(concurrency_group="control")
    def describe(self) -> dict:
        """As every resident; busy with the models whose jobs run."""
        self.busy = ", ".join(self._server.jobs.values())
        return super().describe()

    @ray.method(concurrency_group="control")
    def socket_path(self) -> str:
        return self._server.path

    @ray.method(concurrency_group="control")
    def retire(self, root: str) -> bool:
        """Take no more jobs and end the actors of this code, when idle. root: the folder whose client asks."""
        if not self._server.retire(idle_s=0.0 if root == self.root else FOREIGN_IDLE_S):
            return False
        actors.kill_residents(self.code_id)
        return True

    def _down(self) -> None:
        if paths.is_local(self.address):
            head.request_down()
        else:
            self._leave()

    def _leave(self) -> None:
        """End our actors on a cluster that is not ours to end, and ourselves."""
        self._server.close()
        actors.kill_residents(self.code_id)
        os._exit(0)

    def _end_when_idle(self) -> None:
        while not self._server.retire(idle_s=60 * self.idle_minutes):
            time.sleep(1.0)
        self._leave()


def _run_job(job, runtime, cwd, emit, cancelled):
    from stages.runner import run_job

    return run_job(job, runtime, cwd, emit, cancelled)


def _import_runner() -> None:
    # Early, so that the first job does not wait, and so that an edit made later cannot be half imported.
    with contextlib.suppress(Exception):
        import stages.runner

        stages.runner.load()


def create(runtime: dict) -> str:
    """Find or start the cluster and the dispatcher of this code on it. Returns the path of its socket.

    runtime: code_id, and cluster: {address, cpus, gpus, port, idle_minutes, object_store_mb}, each optional.
    Raises UserError, in one line, for all that the user can mend.
    """
    settings = dict(runtime.get("cluster") or {})
    address, code_id = settings.get("address") or "local", runtime["code_id"]
    if paths.is_local(address):
        address = "local"
        names = ("cpus", "gpus", "port", "idle_minutes", "object_store_mb")
        target = head.up(**{name: settings[name] for name in names if settings.get(name) is not None}).address
    else:
        target = address
    head.connect(target)
    here = ray.get_runtime_context().get_node_id()
    if not any(node["NodeID"] == here and node["Alive"] for node in ray.nodes()):
        raise UserError(f"cluster.address {target}: this machine is not one of its nodes; run on a node of the cluster")
    own = actors.actor_name("dispatcher", code_id)
    for name in ray.util.list_named_actors():
        if not name.startswith("dispatcher-"):
            continue
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            other = ray.get_actor(name)
            # One under our own name whose socket did not answer is of no more use.
            if name == own or ray.get(other.retire.remote(actors.ROOT), timeout=10):
                ray.kill(other)
    actor = None
    for _ in range(50):
        try:
            actor = actors.get_or_create(
                "dispatcher",
                Dispatcher,
                code_id=code_id,
                options={"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False)},
                kwargs={"code_id": code_id, "address": address, "idle_minutes": settings.get("idle_minutes") or 0},
                env={"RLHF_STATE_DIR": paths.state_dir(), **_inherited()},
            )
            return ray.get(actor.socket_path.remote(), timeout=60)
        except ray.exceptions.ActorDiedError as error:
            if "killed" not in str(error):
                raise
            time.sleep(0.1)  # the old one of this name is still being taken down
    raise UserError(f"cluster.address {target}: the old dispatcher does not end; run `rlhf cluster down` and try again")


def _inherited() -> dict[str, str]:
    """Variables of the user's shell that our processes should see; the head's may be of another shell, hours old."""
    names = ("HF_HOME", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE", "TMPDIR", "PATH", "CUDA_HOME", "CC", "CXX")
    return {name: os.environ[name] for name in names if name in os.environ} | {"VIRTUAL_ENV": sys.prefix}
