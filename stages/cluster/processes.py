"""Processes told apart for certain: a pid together with its start time, so that a reused pid is never ended."""

import os
import signal
import time
from collections.abc import Iterable

Process = tuple[int, int]
"""(pid, start time in clock ticks since boot, from /proc/PID/stat)."""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from `state` on; None for a process that is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields


def boot_id() -> str:
    """Start times of two boots do not compare."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def identify(pid: int) -> Process | None:
    fields = _stat(pid)
    return None if fields is None else (pid, int(fields[19]))


def alive(process: Process) -> bool:
    return identify(process[0]) == tuple(process)


def family(roots: Iterable[Process]) -> list[Process]:
    """The living `roots`, their descendants, and everybody in a session that one of these still holds.

    A session's number is not given again while a member lives, so its other members are of the same start.
    """
    roots = [(pid, start) for pid, start in roots]
    recorded = {pid for pid, _ in roots}
    roots = [root for root in roots if alive(root)]
    children: dict[int, list[int]] = {}
    sessions: dict[int, list[int]] = {}
    session_of: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
            sessions.setdefault(int(fields[3]), []).append(int(name))
            session_of[int(name)] = int(fields[3])
    own_session = os.getsid(0)
    todo, seen = [root[0] for root in roots], set()
    while todo:
        pid = todo.pop()
        if pid in seen:
            continue
        seen.add(pid)
        todo += children.get(pid, [])
        session = session_of.get(pid)
        # A terminal's session is nobody's to end: only sessions whose leader was ours (the supervisor's) count.
        if session and session != own_session and session in recorded:
            todo += sessions[session]
    seen -= {os.getpid(), 1}
    return [process for pid in sorted(seen) if (process := identify(pid))]


def end(processes: Iterable[Process], *, grace_s: float = 2.0) -> list[Process]:
    """SIGTERM, up to `grace_s`, then SIGKILL, up to 3 s more. Returns those that live even then."""
    left = [tuple(process) for process in processes]
    for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 3.0)):
        for pid, start in left:
            if alive((pid, start)):
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    pass
        limit = time.monotonic() + wait_s
        while (left := [process for process in left if alive(process)]) and time.monotonic() < limit:
            time.sleep(0.02)
        if not left:
            break
    return left


def memory_mb(pid: int | str = "self") -> float:
    """Resident memory (RSS) of a process in MB, 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    except OSError:
        return 0.0


def proportional_memory_mb(processes: Iterable[Process]) -> float:
    """Sum of PSS in MB: shared pages are counted once."""
    total = 0.0
    for pid, _ in processes:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024
        except (OSError, StopIteration):
            pass
    return total
