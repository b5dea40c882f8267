"""Who may work in a project at the same time: one job on a run key, and nobody while results are freed. Locks die with processes."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from stages.errors import UserError

FOLDER = "results/work/locks"
_WAIT_S = 0.2


@contextlib.contextmanager
def one_at_a_time(
    root: Path, name: str, waiting: Callable[[], None] = lambda: None, tick: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold the lock of a run key or a place. waiting: called once if another has it; tick: while it does, may raise."""
    with _file(root, name) as file:
        _take(file, fcntl.LOCK_EX, waiting, tick)
        yield


@contextlib.contextmanager
def shared(root: Path, waiting: Callable[[], None] = lambda: None, tick: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Be one of those who use the project's results; what they have made and nothing names yet is not garbage."""
    with _file(root, "project") as file:
        _take(file, fcntl.LOCK_SH, waiting, tick)
        yield


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Be the only one. Raises UserError when a workflow or a job of one uses the project."""
    with _file(root, "project") as file:
        if not _taken(file, fcntl.LOCK_EX):
            raise UserError(f"{root}: a workflow (or another gc) is running here, and nothing names yet what it makes; wait for its end")
        yield


def in_use(root: Path) -> bool:
    """Whether a workflow, a job of one or a gc uses the project now."""
    with _file(root, "project") as file:
        return not _taken(file, fcntl.LOCK_EX)


def _take(file: IO, how: int, waiting: Callable[[], None], tick: Callable[[], None]) -> None:
    if not _taken(file, how):
        waiting()
        while not _taken(file, how):
            tick()
            time.sleep(_WAIT_S)


def _taken(file: IO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _file(root: Path, name: str) -> IO:
    path = root / FOLDER / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")
