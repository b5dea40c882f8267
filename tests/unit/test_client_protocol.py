"""The socket between the thin client and the dispatcher, with a server in threads of this process; no Ray."""

import io
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stages import client
from stages.cluster import paths
from stages.cluster.ensure import answers
from stages.cluster.progress import Progress
from stages.cluster.server import serve
from stages.errors import UserError

ROOT = Path(__file__).parents[2]
CODE = "0123456789abcdef"
RUNTIME = {"code_id": CODE, "cluster": {"address": "local"}}


def echo(job, runtime, cwd, emit, cancelled):
    match job["stage"]:
        case "echo":
            for done in range(1, 4):
                emit({"event": "progress", "phase": "echo", "done": done, "total": 3, "unit": "step", "metrics": {"loss": 0.5}})
            emit({"event": "log", "message": "hello"})
            return {"said": job["say"], "cwd": cwd}
        case "wrong":
            raise UserError("config: data.prompts.source: no file 'x'; give an existing file")
        case "broken":
            raise ZeroDivisionError("division by\nzero")
        case "wait":
            emit({"event": "log", "message": "waiting"})
            job["cancelled"] = cancelled.wait(10)
            waited.append(job["cancelled"])
            return {}
        case "die":
            raise AssertionError("not reached")


waited: list[bool] = []


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    waited.clear()
    running = serve(paths.socket_path(CODE), echo, code_id=CODE, status=lambda: [{"role": "engine"}])
    yield running
    running.close()


def ask(request: dict) -> list[dict]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(paths.socket_path(CODE))
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as lines:
            return [json.loads(line) for line in lines]


def test_a_job_returns_its_result_and_its_events_in_order(server, tmp_path):
    events = []
    result = client.submit({"stage": "echo", "say": 7}, RUNTIME, on_event=events.append)
    assert result == {"said": 7, "cwd": str(tmp_path)}
    assert events[0]["event"] == "accepted"
    assert events[-1] == {"event": "log", "message": "hello"}
    done = [event["done"] for event in events if event["event"] == "progress"]
    assert done and done == sorted(done)


def test_many_jobs_run_at_once(server):
    results = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(client.submit({"stage": "echo", "say": n}, RUNTIME)["said"])) for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(results) == list(range(20))


def test_the_users_error_is_one_line_and_exit_code_1(server, capsys):
    assert client.run({"stage": "wrong"}, RUNTIME) == 1
    assert capsys.readouterr().err == "rlhf: error: config: data.prompts.source: no file 'x'; give an existing file\n"
    assert not Path("results").exists()


def test_an_unexpected_failure_is_one_line_that_names_the_file_of_the_traceback(server, capsys):
    assert client.run({"stage": "broken", "model": "sft"}, RUNTIME) == 1
    line = capsys.readouterr().err
    assert line.startswith("rlhf: error: ZeroDivisionError: zero; traceback in results/logs/sft-")
    assert line.count("\n") == 1
    assert "in echo" in Path(line.split("traceback in ")[1].strip()).read_text()


def test_a_job_of_another_code_is_refused(server):
    events = ask({"op": "run", "job": {"stage": "echo", "say": 1}, "runtime": {"code_id": "f" * 16}, "cwd": "/"})
    assert [event["event"] for event in events] == ["error"]
    assert "run the command again" in events[0]["message"] and events[0]["trace"] is None


def test_a_closed_connection_cancels_the_job(server):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server.path)
    connection.sendall(json.dumps({"op": "run", "job": {"stage": "wait"}, "runtime": RUNTIME, "cwd": "/"}).encode() + b"\n")
    assert b"accepted" in connection.recv(100)
    connection.close()
    limit = time.monotonic() + 3
    while server.jobs and time.monotonic() < limit:
        time.sleep(0.01)
    assert waited == [True]


@pytest.mark.parametrize("sign, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_interrupted_client_cancels_the_job(server, sign, code):
    # a shell gives its background jobs an ignored SIGINT, and so would this test, run in one; a terminal does not
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"from stages import client; sys.exit(client.run({{'stage': 'wait'}}, {RUNTIME!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stderr.readline() == "rlhf: waiting\n"
    process.send_signal(sign)
    assert process.wait(20) == code
    assert process.stderr.read() == ""
    process.stderr.close()
    limit = time.monotonic() + 3
    while server.jobs and time.monotonic() < limit:
        time.sleep(0.01)
    assert waited == [True]


def test_a_job_is_sent_again_twice_when_the_dispatcher_dies(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / "state"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(paths.socket_path(CODE))
    listener.listen()
    served = []

    def accept_and_die():
        for _ in range(3):
            connection, _ = listener.accept()
            served.append(connection.recv(10))
            connection.close()

    threading.Thread(target=accept_and_die, daemon=True).start()
    assert client.run({"stage": "echo"}, RUNTIME) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(served) == 3
    assert [line for line in lines if "starting again" in line] == [
        f"rlhf: the dispatcher ended in the middle of the job; starting again ({n} of 2)" for n in (1, 2)
    ]
    assert lines[-1].startswith("rlhf: error: the dispatcher ended 3 times under this job")
    listener.close()


def test_ping_and_status_answer(server):
    assert ask({"op": "ping"})[0]["result"] == {"pid": os.getpid(), "code_id": CODE, "jobs": 0}
    assert ask({"op": "status"})[0]["result"] == {"rows": [{"role": "engine"}]}
    assert ask({"op": "dance"})[0]["event"] == "error"
    assert answers(server.path, CODE) and not answers(server.path, "other")


def test_a_broken_request_does_not_stop_the_server(server):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server.path)
        connection.sendall(b"\xff\xfe nonsense\n")
        assert b"not a request" in connection.recv(1000)
    assert client.submit({"stage": "echo", "say": 1}, RUNTIME)["said"] == 1


def test_a_retired_server_takes_no_job_and_a_busy_one_does_not_retire(server):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server.path)
    connection.sendall(json.dumps({"op": "run", "job": {"stage": "wait"}, "runtime": RUNTIME, "cwd": "/"}).encode() + b"\n")
    assert b"accepted" in connection.recv(100)
    assert not server.retire()
    connection.close()
    limit = time.monotonic() + 3
    while server.jobs and time.monotonic() < limit:
        time.sleep(0.01)
    assert not server.retire(idle_s=60)
    assert server.retire()
    assert not os.path.exists(server.path)


def test_state_folder_and_socket_are_private(server):
    assert stat.S_IMODE(os.stat(paths.state_dir()).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(server.path).st_mode) == 0o600


def test_a_long_state_folder_gets_a_short_private_socket_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_STATE_DIR", str(tmp_path / ("long" * 30)))
    path = paths.socket_path(CODE)
    try:
        assert len(path) <= paths.MAX_SOCKET_PATH
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        running = serve(path, echo, code_id=CODE)
        assert answers(path, CODE)
        running.close()
    finally:
        os.rmdir(os.path.dirname(path))


def test_the_client_imports_little_and_in_less_than_60_ms():
    program = "import time; t = time.perf_counter(); import stages.client; print(time.perf_counter() - t)\nimport sys; print(*sys.modules)"
    seconds, modules = [], ""
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        first, modules = out.stdout.splitlines()
        seconds.append(float(first))
    assert min(seconds) < 0.060
    assert not {"ray", "torch", "pydantic", "typer", "rich", "subprocess", "asyncio"} & set(modules.split())


def test_a_log_gets_the_first_and_the_last_line_and_few_between():
    out = io.StringIO()
    progress = Progress(out)
    for done in range(101):
        progress.update({"phase": "sft", "done": done, "total": 100, "unit": "step", "tokens_per_s": 5812.3, "metrics": {"loss": 0.25}})
    lines = out.getvalue().splitlines()
    assert lines[0] == "rlhf: sft 0/100 step, 5,812 tokens/s, loss 0.25"
    assert lines[-1] == "rlhf: sft 100/100 step, 5,812 tokens/s, loss 0.25"
    assert len(lines) == 2


def test_a_terminal_gets_a_live_line_that_is_taken_away():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    progress = Progress(out)
    progress.update({"phase": "sft", "done": 5, "total": 10})
    progress.say("done")
    assert "━━━━━━━━━━──────────" in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[Krlhf: done\n")
