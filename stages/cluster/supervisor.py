"""The parent of everything that the local Ray head starts; `python -S -m stages.cluster.supervisor <settings>`.

It is a session leader and a child subreaper, so every process of the head, however it detaches itself, stays its
descendant and can be ended exactly. It ends all of them, and itself, on SIGTERM, when a process of the head
dies, and when nobody has used the cluster for `idle_minutes` (the age of the file `activity`). Only the standard library: 5 MB.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from stages.cluster import processes

PR_SET_CHILD_SUBREAPER = 36


def write_record(folder: str, record: dict) -> None:
    """Replace cluster.json in one step, 0600."""
    path = os.path.join(folder, "cluster.json")
    temporary = f"{path}.{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(record, file, indent=1, sort_keys=True)
    os.replace(temporary, path)


def read_record(folder: str) -> dict | None:
    try:
        with open(os.path.join(folder, "cluster.json")) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def remove_traces(folder: str, record: dict) -> None:
    """Remove what the head left on disk: its temporary folder, the sockets, cluster.json (the log and the token stay)."""
    shutil.rmtree(record["temp_dir"], ignore_errors=True)
    for name in os.listdir(record["socket_dir"]):
        if name.endswith(".sock") and not _answers(path := os.path.join(record["socket_dir"], name)):
            _unlink(path)
    if record["socket_dir"] != folder:
        try:
            os.rmdir(record["socket_dir"])
        except OSError:
            pass
    found = read_record(folder)
    if found is None or found["supervisor"] == list(record["supervisor"]):
        _unlink(os.path.join(folder, "cluster.json"))


def _answers(path: str) -> bool:
    """A dispatcher on another cluster may have its socket in the same folder."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end_all(own: processes.Process) -> None:
    # New children may appear while the old ones are ended, so look again until there are none.
    for attempt in range(5):
        left = [process for process in processes.family([own]) if process[0] != own[0]]
        if not left:
            return
        processes.end(left, grace_s=1.0 if attempt == 0 else 0.0)
        _reap()


def main(folder: str, record: dict) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own = processes.identify(os.getpid())
    assert own is not None
    record |= {"supervisor": own, "boot_id": processes.boot_id()}
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append("asked to"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    launch = subprocess.Popen([sys.executable, "-m", "stages.cluster.launch", json.dumps(record)], stdin=subprocess.DEVNULL)
    while launch.poll() is None and not stop:
        time.sleep(0.02)
    if launch.poll() != 0:
        _end_all(own)
        remove_traces(folder, record)
        return 1
    head = [process for process in processes.family([own]) if process[0] != own[0]]
    # The processes that the cluster cannot live without: the direct children (GCS, dashboard, raylet).
    vital = [process for process in head if _parent(process[0]) == own[0]]
    write_record(folder, record | {"status": "ready", "processes": [own, *head]})
    activity = os.path.join(folder, "activity")
    while not stop:
        time.sleep(0.25)
        _reap()
        if not all(processes.alive(process) for process in vital):
            stop.append("a process of the Ray head has died")
        if record["idle_minutes"]:
            try:
                idle_s = time.time() - os.stat(activity).st_mtime
            except OSError:
                idle_s = 0.0
            if idle_s > 60 * record["idle_minutes"]:
                stop.append(f"idle for {record['idle_minutes']} minutes")
    print(time.strftime("%F %T"), "ending the cluster:", stop[0], flush=True)
    _end_all(own)
    remove_traces(folder, record)
    return 0


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
