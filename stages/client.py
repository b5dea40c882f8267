"""The thin client that Snakemake starts for a rule: it sends the job to the dispatcher and shows what comes back.

On the warm path it imports sockets and JSON and nothing else.
"""

import json
import os
import socket
import sys
from collections.abc import Callable

from stages.cluster import paths
from stages.errors import UserError
from stages.sources import SECRET

RESTARTS = 2
"""How often a job is sent again when the dispatcher dies under it."""


class DispatcherLost(Exception):
    """The connection ended before the job did."""


class JobFailed(Exception):
    """An unexpected failure inside the dispatcher; args: one-line message, traceback text."""


def run(job: dict, runtime: dict) -> int:
    """Run a job and return the exit code: 0, 1 after one line `rlhf: error: ...` on stderr, 130 after Ctrl-C.

    job: as `stages.plan` makes it. runtime: {"code_id": fingerprint of the whole code, "cluster": {"address", "cpus",
    "gpus", "port", "idle_minutes", "object_store_mb"}}. A traceback goes to results/logs/, and the line names the file.
    """
    import signal

    from stages.cluster.progress import Progress

    def terminated(*_: object) -> None:
        raise SystemExit(143)

    try:
        signal.signal(signal.SIGTERM, terminated)
    except ValueError:
        pass  # not in the main thread; whoever started us deals with signals
    progress = Progress()
    message = None
    try:
        submit(job, runtime, on_event=lambda event: _show(progress, event), say=progress.say)
        return 0
    except UserError as error:
        message = str(error)
    except JobFailed as error:
        message, trace = error.args
        message += f"; traceback in {_write_trace(job, trace)}"
    except KeyboardInterrupt:
        return 130
    except DispatcherLost:
        message = f"the dispatcher ended {RESTARTS + 1} times under this job; see {os.path.join(paths.state_dir(), 'head.log')}"
    except Exception:  # the user gets a line and a file, whatever happens
        import traceback

        trace = traceback.format_exc()
        message = f"{trace.strip().splitlines()[-1]}; traceback in {_write_trace(job, trace)}"
    finally:
        progress.clear()
    print("rlhf: error:", "; ".join(message.splitlines()), file=sys.stderr, flush=True)
    return 1


def submit(
    job: dict,
    runtime: dict,
    *,
    on_event: Callable[[dict], None] = lambda event: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict:
    """Run a job and return its result. Starts the cluster and the dispatcher when they are not there.

    When the dispatcher dies under the job, starts again and resubmits at most RESTARTS times, saying so. Raises
    UserError, JobFailed, or DispatcherLost when that was in vain.
    """
    lost = 0
    while True:
        connection = _connect(runtime, say)
        try:
            with connection:
                return _converse(connection, job, runtime, on_event)
        except DispatcherLost:
            if lost == RESTARTS:
                raise
            lost += 1
            say(f"the dispatcher ended in the middle of the job; starting again ({lost} of {RESTARTS})")


def _connect(runtime: dict, say: Callable[[str], None]) -> socket.socket:
    path = paths.socket_path(runtime["code_id"], (runtime.get("cluster") or {}).get("address"))
    try:
        return _open(path)
    except OSError:
        from stages.cluster.ensure import start

        say("starting the cluster or its dispatcher")
        return _open(start(runtime))


def _open(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _converse(connection: socket.socket, job: dict, runtime: dict, on_event: Callable[[dict], None]) -> dict:
    named = [name for entry in job.get("params", {}).get("rewards", ()) for name in SECRET.findall(entry["source"])]
    secrets = {name: os.environ[name] for name in named if name in os.environ}
    request = {"op": "run", "job": job, "runtime": runtime | {"secrets": secrets}, "cwd": os.getcwd()}
    try:
        connection.sendall(json.dumps(request, separators=(",", ":")).encode() + b"\n")
        with connection.makefile("rb") as lines:
            for line in lines:
                event = json.loads(line)
                kind = event.get("event")
                if kind == "done":
                    return event["result"]
                if kind == "error":
                    raise (UserError(event["message"]) if event.get("trace") is None else JobFailed(event["message"], event["trace"]))
                on_event(event)
    except (OSError, ValueError) as error:
        raise DispatcherLost() from error
    raise DispatcherLost()


def _show(progress, event: dict) -> None:
    if event.get("event") == "progress":
        progress.update(event)
    elif event.get("event") == "log":
        progress.say(event.get("message", ""))


def _write_trace(job: dict, trace: str) -> str:
    import time

    name = str(job.get("model") or job.get("stage") or "job").replace(os.sep, "-")
    path = os.path.join("results", "logs", f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(trace)
    except OSError as error:
        return f"no file ({path}: {error.strerror})"
    return path
