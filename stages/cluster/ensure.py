"""The way from a thin client to a dispatcher: the socket when it answers, else a helper process that starts what is missing.

The helper (`python -m stages.cluster.ensure`) keeps `import ray`, its threads and its messages out of the client.
"""

import json
import os
import socket
import sys

from stages.cluster import paths
from stages.errors import UserError


def ensure_dispatcher(runtime: dict) -> str:
    """The path of a socket that answers. runtime: code_id, cluster (see `dispatcher.create`)."""
    path = paths.socket_path(runtime["code_id"], (runtime.get("cluster") or {}).get("address"))
    return path if answers(path, runtime["code_id"]) else start(runtime)


def answers(path: str, code_id: str, timeout_s: float = 5.0) -> bool:
    """True when a dispatcher of this code replies to a ping."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(path)
            connection.sendall(b'{"op": "ping"}\n')
            with connection.makefile("rb") as lines:
                return json.loads(lines.readline())["result"]["code_id"] == code_id
    except (OSError, ValueError, KeyError):
        return False


def start(runtime: dict) -> str:
    """Start what is missing, in a helper process. Raises its UserError; anything else as RuntimeError with the trace."""
    import subprocess
    from pathlib import Path

    root = str(Path(__file__).parents[2])
    helper = subprocess.run(
        [sys.executable, "-m", "stages.cluster.ensure"],
        input=json.dumps(runtime),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": root},
    )
    for line in reversed(helper.stdout.splitlines()):
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and "path" in answer:
            return answer["path"]
        if isinstance(answer, dict) and "user_error" in answer:
            raise UserError(answer["user_error"])
    raise RuntimeError(f"the dispatcher did not start (exit code {helper.returncode}): {helper.stderr[-4000:].strip()}")


def main() -> None:
    runtime = json.load(sys.stdin)
    try:
        path = paths.socket_path(runtime["code_id"], (runtime.get("cluster") or {}).get("address"))
        from stages.cluster.head import locked

        with locked("dispatcher.lock"):
            if not answers(path, runtime["code_id"]):
                from stages.cluster.dispatcher import create

                path = create(runtime)
        answer = {"path": path}
    except UserError as error:
        answer = {"user_error": str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # leaving Ray properly takes 0.3 s and changes nothing


if __name__ == "__main__":
    main()
