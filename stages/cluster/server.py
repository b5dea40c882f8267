"""The socket behind which jobs run: JSON lines over a unix socket, one job a connection. Neither Ray nor torch here.

The client sends one line and reads lines until `done` or `error`:

    {"op": "run", "job": {...}, "runtime": {"code_id": ..., ...}, "cwd": folder}
        -> {"event": "accepted", "pid"} {"event": "progress" | "log", ...}* then
           {"event": "done", "result": {...}} | {"event": "error", "message": one line, "trace": text | null}
    {"op": "ping"}     -> {"event": "done", "result": {"pid", "code_id", "jobs"}}
    {"op": "status"}   -> {"event": "done", "result": {"rows": [...]}}
    {"op": "down"}     -> {"event": "done", "result": {}}, then the cluster ends

A client that closes its end, by Ctrl-C or kill -9, cancels its job. `trace` is null for a UserError.
"""

import contextlib
import json
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from stages.errors import UserError

RunJob = Callable[[dict, dict, str, Callable[[dict], None], threading.Event], dict]


class Server:
    """Serves until `close`. jobs: what runs now; last_used: end of the latest job, on the monotonic clock."""

    def __init__(
        self,
        path: str,
        run_job: RunJob,
        *,
        code_id: str,
        status: Callable[[], list[dict]] = list,
        down: Callable[[], None] = lambda: None,
        activity: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.code_id = path, code_id
        self.jobs: dict[int, str] = {}
        self.last_used = time.monotonic()
        self._run_job, self._status, self._down, self._activity = run_job, status, down, activity
        self._closing = False
        self._retired = False
        self._lock = threading.Lock()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Bound under a private name and renamed, so that nobody finds it before it is 0600 and listens.
        temporary = f"{path}.{os.getpid()}"[-107:]
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        self._listener.bind(temporary)
        os.chmod(temporary, 0o600)
        self._listener.listen(64)
        os.rename(temporary, path)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        threading.Thread(target=self._keep_alive, name="activity", daemon=True).start()

    def close(self) -> None:
        """Stop accepting; running jobs go on."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def retire(self, *, idle_s: float = 0.0) -> bool:
        """Refuse further jobs, unless one runs or ran in the last `idle_s` seconds. True when retired."""
        with self._lock:
            if self.jobs or time.monotonic() - self.last_used < idle_s:
                return False
            self._retired = True
        self.close()
        return True

    def _accept(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _keep_alive(self) -> None:
        while not self._closing or self.jobs:
            if self.jobs:
                self._activity()
            time.sleep(1.0)

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines, contextlib.suppress(OSError):
            line = lines.readline()
            try:
                request = json.loads(line)
                op = request["op"]
            except (ValueError, KeyError, TypeError):
                if line:
                    _send(connection, {"event": "error", "message": "not a request of this protocol", "trace": None})
                return
            if op == "run":
                self._serve_job(connection, lines, request)
                return
            try:
                if op == "ping":
                    result: dict[str, Any] = {"pid": os.getpid(), "code_id": self.code_id, "jobs": len(self.jobs)}
                elif op == "status":
                    result = {"rows": self._status()}
                elif op == "down":
                    result = {}
                else:
                    raise UserError(f"no operation '{op}'; there are run, ping, status, down")
                _send(connection, {"event": "done", "result": result})
            except Exception as error:  # whatever it is, the client must hear of it
                _send(connection, _failure(error))
            if op == "down":
                self._down()

    def _serve_job(self, connection: socket.socket, lines: Any, request: dict) -> None:
        theirs = request.get("runtime", {}).get("code_id")
        me = threading.get_ident()
        with self._lock:
            refused = self._retired or theirs != self.code_id
            if not refused:
                self.jobs[me] = str(request["job"].get("model") or request["job"].get("stage") or "job")
        if refused:
            message = f"code changed: this dispatcher runs {self.code_id[:12]}, the job wants {str(theirs)[:12]}; run the command again"
            _send(connection, {"event": "error", "message": message, "trace": None})
            return
        cancelled, lock = threading.Event(), threading.Lock()

        def emit(event: dict) -> None:
            """Send unless the client is gone; progress is dropped when the client does not keep up."""
            with lock, contextlib.suppress(OSError):
                if not cancelled.is_set() and (event.get("event") != "progress" or select.select([], [connection], [], 0)[1]):
                    _send(connection, event)

        def work() -> None:
            try:
                result = self._run_job(request["job"], request["runtime"], request["cwd"], emit, cancelled)
                answer = {"event": "done", "result": result}
                json.dumps(answer, default=_plain)  # fails here rather than half sent
            except BaseException as error:
                answer = _failure(error)
            with self._lock:
                del self.jobs[me]
                self.last_used = time.monotonic()
            self._activity()
            emit(answer)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

        self._activity()
        emit({"event": "accepted", "pid": os.getpid(), "code_id": self.code_id})
        worker = threading.Thread(target=work, name="job", daemon=True)
        worker.start()
        with contextlib.suppress(OSError):
            while lines.read(4096):
                pass
        cancelled.set()
        worker.join()


def serve(path: str, run_job: RunJob, *, code_id: str, **callbacks: Any) -> Server:
    """Serve `run_job` on the unix socket `path` from threads of this process. See Server for the callbacks."""
    return Server(path, run_job, code_id=code_id, **callbacks)


def _send(connection: socket.socket, event: dict) -> None:
    connection.sendall(json.dumps(event, separators=(",", ":"), default=_plain).encode() + b"\n")


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, and paths, as JSON."""
    return value.item() if hasattr(value, "item") else str(value)


def _failure(error: BaseException) -> dict:
    if isinstance(error, UserError):
        return {"event": "error", "message": str(error), "trace": None}
    # Ray wraps what an actor raises; the user's error inside it is still the user's.
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError):
        return {"event": "error", "message": str(cause), "trace": None}
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[-1].strip()}" if text else type(error).__name__
    return {"event": "error", "message": message[:500], "trace": "".join(traceback.format_exception(error))}
