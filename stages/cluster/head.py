"""Life of the local Ray head: up, find, down; and connecting to it or to another cluster.

State lives in `paths.state_dir()`: cluster.json (who runs, with start times), token (0600), head.log, lock files.
Every process listens on the loopback interface only, and wants the token besides.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.cluster import paths, processes
from stages.cluster.supervisor import read_record, remove_traces, write_record
from stages.errors import UserError

NAMESPACE = "rlhf-stages"
START_TIMEOUT_S = 90.0
PROBE_TIMEOUT_S = 1.5


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A live local head."""

    address: str
    """host:port of the GCS, for `connect`"""
    dashboard: str
    """http://host:port of Ray's state API"""
    pid: int
    """the supervisor, ancestor of every process of the head"""
    started: float
    """seconds since the epoch"""
    idle_minutes: float
    """unused for so long, it ends itself; 0: never"""
    temp_dir: str
    """Ray's session folder, removed by `down`"""

    def memory_mb(self) -> float:
        """PSS of all its processes together, workers included."""
        own = processes.identify(self.pid)
        return processes.proportional_memory_mb(processes.family([own]) if own else [])


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the file lock `name` of the state folder; the system releases it when the process dies."""
    with open(os.open(os.path.join(paths.state_dir(), name), os.O_RDWR | os.O_CREAT, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def token_path() -> str:
    """The file that guards the cluster; made when missing."""
    path = os.path.join(paths.state_dir(), "token")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        os.chmod(path, 0o600)
    return path


def environment() -> dict[str, str]:
    """Variables that the local head and its clients need alike."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": token_path(),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's switch for laptops, which works on Linux too: the node is 127.0.0.1 and nothing listens elsewhere.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }


def listens(address: str, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """True when somebody accepts TCP connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def find() -> Cluster | None:
    """The recorded head when it is alive, else None."""
    record = read_record(paths.state_dir())
    if not record or record["status"] != "ready" or not _living(record) or not listens(record["address"]):
        return None
    return Cluster(
        address=record["address"],
        dashboard=f"http://127.0.0.1:{record['dashboard_port']}",
        pid=record["supervisor"][0],
        started=record["started"],
        idle_minutes=record["idle_minutes"],
        temp_dir=record["temp_dir"],
    )


def up(
    *,
    cpus: int | None = None,
    gpus: int | None = None,
    port: int | None = None,
    idle_minutes: float = 30,
    object_store_mb: int = 512,
) -> Cluster:
    """The local head: the recorded one when it is alive, else a new one.

    cpus, gpus: what Ray may hand out; None: what the machine has. port: of the GCS; None or 0: a free one. Safe to call from
    several processes at once. Raises UserError when the port is taken or the head does not start.
    """
    folder = paths.state_dir()
    with locked("head.lock"):
        port = port or None
        paths.touch_activity()
        record = read_record(folder)
        if record and record["status"] == "starting" and _living(record):
            _await_ready(folder, record)
        if cluster := find():
            return cluster
        _clear(folder)
        if port is not None and not _is_free(port):
            raise UserError(f"cluster.port {port}: in use by another program; name another port or leave it out")
        temp_dir = tempfile.mkdtemp(prefix="rlhf-", dir="/tmp" if len(tempfile.gettempdir()) > 20 else None)
        port, dashboard_port = (port, *_free_ports(1)) if port is not None else _free_ports(2)
        record = {
            "status": "starting",
            "address": f"127.0.0.1:{port}",
            "port": port,
            "dashboard_port": dashboard_port,
            "cpus": cpus,
            "gpus": gpus,
            "object_store_mb": object_store_mb,
            "idle_minutes": idle_minutes,
            "temp_dir": temp_dir,
            "socket_dir": paths.socket_dir(),
            "started": time.time(),
            "boot_id": processes.boot_id(),
            "processes": [],
        }
        supervisor = _start_supervisor(folder, record)
        record["supervisor"] = processes.identify(supervisor.pid) or (supervisor.pid, 0)
        write_record(folder, record)
        _await_ready(folder, record)
        if cluster := find():
            return cluster
    raise UserError(f"the Ray head did not start: {_last_line(folder)}; see {os.path.join(folder, 'head.log')}")


def down() -> bool:
    """End the recorded head, its descendants and nothing else. False when there was none."""
    with locked("head.lock"):
        return _clear(paths.state_dir())


def request_down() -> None:
    """Ask the supervisor to end the cluster and return at once; for a process that is itself part of it."""
    record = read_record(paths.state_dir())
    if record and _living(record):
        os.kill(record["supervisor"][0], 15)


def connect(address: str) -> None:
    """`ray.init` as a driver of the cluster at host:port, in our namespace, quietly.

    Raises UserError within 2 s when nobody listens there, and when the cluster refuses us.
    """
    if not listens(address):
        raise UserError(f"cluster.address {address}: nobody listens; start it with `rlhf cluster up` or set cluster.address: local")
    record = read_record(paths.state_dir())
    if record and record["address"] == address:
        os.environ.update(environment())
    else:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"):
            os.environ.setdefault(name, environment()[name])
        if address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
            # A head of another state folder: without this, Ray looks for it on the machine's outer address, for minutes.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import logging

    late = "ray" in sys.modules
    import ray

    if late and not ray.is_initialized():
        # Ray read its environment when it was imported: let it read again.
        import ray._private.ray_constants as ray_constants
        from ray._raylet import AuthenticationTokenLoader, Config

        ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1") not in ("0", "false")
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            ignore_reinit_error=True,
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"cluster.address {address}: cannot connect ({reason}); the client must run on a node of the cluster and "
            "RAY_AUTH_TOKEN_PATH must name its token"
        ) from error


def status() -> list[dict]:
    """One row per live actor of ours on the local head (see `actors.list_residents`); empty without a head."""
    cluster = find()
    if cluster is None:
        return []
    connect(cluster.address)
    from stages.cluster.actors import list_residents

    return list_residents()


def _living(record: dict) -> bool:
    return record["boot_id"] == processes.boot_id() and processes.alive(tuple(record["supervisor"]))


def _start_supervisor(folder: str, record: dict) -> subprocess.Popen:
    import json

    root = str(Path(__file__).parents[2])
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RAY_", "SNAKEMAKE_")) and name not in ("PYTHONPATH", "PYTHONHOME")
    }
    settings = environment() | {
        "PYTHONPATH": root,
        "RLHF_STATE_DIR": folder,
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
        "RAY_enable_metrics_collection": "0",
        # No idle workers in advance: every actor of ours needs a process of its own environment anyway.
        "RAY_prestart_worker_first_driver": "0",
    }
    with open(os.open(os.path.join(folder, "head.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as log:
        return subprocess.Popen(
            [sys.executable, "-S", "-m", "stages.cluster.supervisor", folder, json.dumps(record)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=inherited | {name: value for name, value in settings.items() if value},
        )


def _await_ready(folder: str, record: dict) -> None:
    limit = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < limit and processes.alive(tuple(record["supervisor"])):
        found = read_record(folder)
        if found and found["status"] == "ready":
            return
        time.sleep(0.02)


def _clear(folder: str) -> bool:
    """End what the record names, dead or half-dead, and remove its traces."""
    record = read_record(folder)
    if record is None:
        return False
    lived = False
    if record["boot_id"] == processes.boot_id():
        supervisor = tuple(record["supervisor"])
        members = processes.family([supervisor, *record["processes"]])
        lived = bool(members)
        if processes.alive(supervisor):
            os.kill(supervisor[0], 15)
            limit = time.monotonic() + 8
            while processes.alive(supervisor) and time.monotonic() < limit:
                time.sleep(0.02)
        if left := [member for member in members if processes.alive(member)]:
            left = processes.end(sorted({*left, *processes.family(left)}))
            if left:
                raise UserError(f"cluster down: processes {[pid for pid, _ in left]} do not end; end them by hand")
    if os.path.isdir(record["socket_dir"]):
        remove_traces(folder, record)
    else:
        shutil.rmtree(record["temp_dir"], ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "cluster.json"))
    return lived


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return True
    except (OSError, OverflowError):
        return False


def _free_ports(count: int) -> tuple[int, ...]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return tuple(probe.getsockname()[1] for probe in probes)


def _last_line(folder: str) -> str:
    try:
        with open(os.path.join(folder, "head.log"), errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
    except OSError:
        lines = []
    return lines[-1][:200] if lines else "no message"
