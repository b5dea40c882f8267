"""A real Ray head of our own: its life, its guards, the dispatcher and residents on it. The project's `runner` is a stub."""

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = "0123456789abcdef"
RUNTIME = {"code_id": CODE, "cluster": {"address": "local", "cpus": 2, "object_store_mb": 80}}
RUNNER = """
import os, time
import ray
from stages.cluster.actors import Resident, get_or_create
from stages.errors import UserError

class Worker(Resident):
    def __init__(self, *, code_id):
        super().__init__(role="engine", code_id=code_id)
    def load(self, state_id):
        self.hold("policy", state_id)
    def slow(self, seconds):
        with self.working("generate"):
            time.sleep(seconds)
    def code(self):
        return __file__

@ray.remote(num_cpus=1)
def square(x):
    return x * x

def load():
    pass

def run_job(job, runtime, cwd, emit, cancelled):
    match job["stage"]:
        case "noop":
            return {}
        case "engine":
            code_id = runtime["code_id"]
            worker = get_or_create("engine-0", Worker, code_id=code_id, options={"num_cpus": 1}, kwargs={"code_id": code_id})
            ray.get(worker.load.remote("store/sft:actor:abc"))
            worker.slow.remote(job["seconds"])
            limit = time.monotonic() + 4
            while ray.get(worker.describe.remote(), timeout=2)["busy"] != "generate":
                assert time.monotonic() < limit
            return {}
        case "task":
            emit({"event": "log", "message": f"square {ray.get(square.remote(7))}"})
            return {}
        case "large":
            get_or_create("large", Worker, code_id=runtime["code_id"], options={"num_cpus": 64})
        case "user":
            raise UserError("data.prompts.source: no such file; give an existing one")
        case "die":
            if not os.path.exists(died := os.path.join(cwd, "died")):
                open(died, "w").close()
                os._exit(1)
            return {}
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone of the project whose runner is the stub above, a state folder of its own, and no cluster yet or left."""
    folder = tmp_path_factory.mktemp("clone")
    package = folder / "stages"
    (package / "cluster").mkdir(parents=True)
    for name in ("__init__.py", "errors.py", "sources.py", "client.py", "cluster/__init__.py"):
        shutil.copy(ROOT / "stages" / name, package / name)
    ours = (
        "actors",
        "dispatcher",
        "ensure",
        "head",
        "launch",
        "paths",
        "placement",
        "processes",
        "progress",
        "server",
        "status",
        "supervisor",
    )
    for name in ours:
        shutil.copy(ROOT / "stages" / "cluster" / f"{name}.py", package / "cluster")
    (package / "runner.py").write_text(RUNNER)
    yield folder
    python(folder, "from stages.cluster import head; head.down()")


def environment(clone):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"PYTHONPATH": str(clone), "RLHF_STATE_DIR": str(clone / "state")}


def python(clone, program, *arguments, env=None, timeout=90):
    """Run a program with the clone's code in the clone's folder."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=clone,
        env=environment(clone) | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run(clone, stage, runtime=RUNTIME, **job):
    program = "import sys, json; from stages import client; sys.exit(client.run(json.loads(sys.argv[1]), json.loads(sys.argv[2])))"
    return python(clone, program, json.dumps({"stage": stage, **job}), json.dumps(runtime))


def record(clone):
    return json.loads((clone / "state" / "cluster.json").read_text())


def family(clone):
    program = "from stages.cluster import processes as p; import sys, json; print(json.dumps(p.family(json.loads(sys.argv[1]))))"
    found = python(clone, program, json.dumps(record(clone)["processes"]))
    return [tuple(process) for process in json.loads(found.stdout)]


def alive(processes):
    from stages.cluster.processes import alive

    return [process for process in processes if alive(process)]


def test_the_first_job_starts_the_cluster_and_the_next_ones_only_call_it(clone):
    first = run(clone, "noop")
    assert (first.returncode, first.stderr) == (0, "rlhf: starting the cluster or its dispatcher\n")
    began = time.perf_counter()
    second = run(clone, "noop")
    assert (second.returncode, second.stderr, second.stdout) == (0, "", "")
    assert time.perf_counter() - began < 1.0


def test_up_is_idempotent_and_a_driver_connects_in_less_than_a_second(clone):
    program = """
import time
from stages.cluster import head
found = head.find()
assert head.up() == found
import ray
began = time.perf_counter()
head.connect(found.address)
print(time.perf_counter() - began, found.memory_mb())
"""
    out = python(clone, program)
    assert out.stderr == ""
    seconds, memory = map(float, out.stdout.split())
    assert seconds < 1.0
    assert memory < 700


def test_state_files_are_private(clone):
    assert stat.S_IMODE((clone / "state").stat().st_mode) == 0o700
    for name in ("cluster.json", "token", "head.log"):
        assert stat.S_IMODE((clone / "state" / name).stat().st_mode) == 0o600


def test_every_port_of_the_cluster_is_on_the_loopback_interface(clone):
    sockets = set()
    for pid, _ in family(clone):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening.append(fields[1].split(":")[0])
    assert len(listening) >= 5
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_without_the_token_nobody_gets_in(clone):
    found = record(clone)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{found['dashboard_port']}/api/v0/actors", timeout=5)
    assert refused.value.code in (401, 403)
    refused.value.close()
    (clone / "wrong-token").write_text("0" * 64)
    program = "import sys; from ray._raylet import GcsClient; print(GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None))"
    for env in (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(clone / "wrong-token")},
        {"RAY_AUTH_MODE": "disabled"},
    ):
        env |= {"RAY_gcs_server_request_timeout_seconds": "2", "HOME": str(clone)}
        stranger = python(clone, program, found["address"], env=env)
        assert stranger.returncode != 0
        assert "Unauthenticated" in stranger.stderr or "auth" in stranger.stderr.lower()
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(clone / "state" / "token")}
    assert python(clone, program, found["address"], env=env).returncode == 0


def test_a_resident_answers_while_it_is_busy_and_status_lists_it(clone):
    assert run(clone, "engine", seconds=6).returncode == 0
    began = time.perf_counter()
    shown = python(clone, "from stages.cluster.status import print_status; import sys; sys.exit(print_status())", env={"COLUMNS": "160"})
    assert time.perf_counter() - began < 4
    assert shown.returncode == 0
    for word in ("dispatcher", "engine", "policy: store/sft:actor:abc", "generate"):
        assert word in shown.stdout
    program = "from stages.cluster import head; import json; print(json.dumps(head.status()))"
    rows = {row["role"]: row for row in json.loads(python(clone, program).stdout)}
    engine = rows["engine"]
    assert engine["holds"] == {"policy": "store/sft:actor:abc"} and engine["code_id"] == CODE
    assert engine["node"] == socket.gethostname() and engine["memory_mb"] > 10
    assert time.time() - 60 < engine["since"] <= time.time()


def test_rays_own_state_api_lists_our_actors(clone):
    program = """
from stages.cluster import head
import os
os.environ.update(head.environment())
from ray.util.state import list_actors, list_nodes
found = head.find()
print(*[actor.class_name for actor in list_actors(found.dashboard) if actor.state == "ALIVE"], len(list_nodes(found.dashboard)))
"""
    out = python(clone, program)
    assert "Dispatcher" in out.stdout and "Worker" in out.stdout and out.stdout.split()[-1] == "1", out.stderr


def test_a_job_may_use_ray_after_the_client_that_started_all_is_gone(clone):
    out = run(clone, "task")
    assert (out.returncode, out.stderr) == (0, "rlhf: square 49\n")


def test_a_placement_larger_than_the_cluster_is_refused_at_once(clone):
    out = run(clone, "large")
    assert out.returncode == 1
    assert out.stderr == "rlhf: error: hardware: large-0123456789ab wants 64 CPU on one node, the largest has 2 CPU; ask for less\n"


def test_a_dispatcher_that_dies_is_started_again_and_the_job_resubmitted(clone):
    out = run(clone, "die")
    assert out.returncode == 0
    lines = out.stderr.splitlines()
    assert lines[0] == "rlhf: the dispatcher ended in the middle of the job; starting again (1 of 2)"
    assert len([line for line in lines if "starting again" not in line]) == 1, lines  # a busy machine may need the second try


def test_changed_code_gets_a_dispatcher_of_its_own_and_the_idle_old_one_ends(clone):
    assert run(clone, "noop", runtime=RUNTIME | {"code_id": "f" * 16}).returncode == 0
    program = "from stages.cluster import head; print(*[row['name'] for row in head.status()])"
    assert python(clone, program).stdout.split() == ["dispatcher-ffffffffffff"]


def test_an_address_where_nobody_listens_fails_within_2_s_in_one_line(clone):
    began = time.perf_counter()
    out = run(clone, "noop", runtime={"code_id": CODE, "cluster": {"address": "127.0.0.1:9"}})
    assert time.perf_counter() - began < 2.0
    assert out.returncode == 1
    assert out.stderr.splitlines()[-1] == (
        "rlhf: error: cluster.address 127.0.0.1:9: nobody listens; start it with `rlhf cluster up` or set cluster.address: local"
    )


def test_a_cluster_of_somebody_else_is_reached_by_address_and_token(clone):
    runtime = {"code_id": CODE, "cluster": {"address": record(clone)["address"]}}
    program = "import sys, json; from stages import client; sys.exit(client.run({'stage': 'task'}, json.loads(sys.argv[1])))"
    env = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(clone / "state" / "token"),
        "RLHF_STATE_DIR": str(clone / "guest"),
    }
    out = python(clone, program, json.dumps(runtime), env=env)
    assert (out.returncode, out.stderr.splitlines()[-1]) == (0, "rlhf: square 49")


def test_down_leaves_no_process_and_no_file(clone):
    found, processes = record(clone), family(clone)
    assert len(processes) > 8
    began = time.perf_counter()
    assert python(clone, "from stages.cluster import head; print(head.down(), head.find(), head.down())").stdout == "True None False\n"
    assert time.perf_counter() - began < 5
    assert alive(processes) == []
    assert not os.path.exists(found["temp_dir"])
    assert {path.name for path in (clone / "state").iterdir()} <= {
        "token",
        "head.log",
        "head.lock",
        "dispatcher.lock",
        "activity",
    }


def test_a_port_in_use_is_one_line_that_names_it(clone):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        out = run(clone, "noop", runtime={"code_id": CODE, "cluster": {"port": port}})
    assert out.returncode == 1
    assert out.stderr.splitlines()[-1] == (
        f"rlhf: error: cluster.port {port}: in use by another program; name another port or leave it out"
    )
    assert not (clone / "state" / "cluster.json").exists()


def test_up_again_after_the_supervisor_was_killed_ends_what_it_left(clone):
    assert python(clone, "from stages.cluster import head; head.up(cpus=1, object_store_mb=80)").returncode == 0
    old, processes = record(clone), family(clone)
    os.kill(old["supervisor"][0], signal.SIGKILL)
    assert python(clone, "from stages.cluster import head; assert head.find() is None; head.up(cpus=1, idle_minutes=0.02)").returncode == 0
    assert alive(processes) == []
    assert not os.path.exists(old["temp_dir"])
    assert record(clone)["supervisor"] != old["supervisor"]


def test_an_idle_cluster_ends_itself(clone):
    found, processes = record(clone), family(clone)
    limit = time.monotonic() + 60
    while ((clone / "state" / "cluster.json").exists() or alive(processes)) and time.monotonic() < limit:
        time.sleep(0.1)
    assert not (clone / "state" / "cluster.json").exists() and alive(processes) == []
    assert not os.path.exists(found["temp_dir"])


def test_a_reused_pid_is_never_ended():
    from stages.cluster.processes import end, family, identify

    bystander = subprocess.Popen(["sleep", "30"])
    try:
        pid, start = identify(bystander.pid)
        assert family([(pid, start - 1)]) == []
        assert end([(pid, start - 1)], grace_s=0) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
