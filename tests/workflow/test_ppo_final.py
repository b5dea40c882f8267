"""The main job on a smaller world: the real Snakemake, Ray, vLLM, DeepSpeed and DVC, from an empty folder to a report."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def undisturbed(project):
    """The manifests of the first run, before any test changes anything."""
    return project.manifests()


def test_the_run_ends_with_a_table_of_models(project, undisturbed):
    rows = json.loads((project.folder / "results/report/summary.json").read_text())
    by_model = {row["model"]: row for row in rows}
    assert set(by_model) == {"sft", "ppo"}
    for row in rows:
        assert {"gold_reward", "win_rate", "win_rate_se", "response_length", "reward_model_score", "kl"} <= set(row)
    assert abs(by_model["sft"]["kl"]) < 1e-4
    assert 0.0 <= by_model["ppo"]["win_rate"] <= 1.0
    assert "| ppo" in project.output.stdout + project.output.stderr
    timings = (project.folder / "results/report/timings.md").read_text()
    for phase in ("generation", "weight sync", "logits and rewards", "training", "workflow"):
        assert phase in timings


def test_every_artifact_opens_with_the_tools_of_the_field(project):
    import datasets
    import pyarrow as pa
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    rollouts = project.artifact("ppo-*/0001/rollouts") / "rollouts.arrow"
    assert len(datasets.Dataset.from_file(str(rollouts))) == 32
    with pa.memory_map(str(rollouts)) as source:
        assert pa.ipc.open_stream(source).read_all().num_rows == 32
    runs = project.folder / "results/runs/default"
    for name in ("sft", "ppo"):
        model = AutoModelForCausalLM.from_pretrained(runs / name)
        assert model.config.eos_token_id == AutoTokenizer.from_pretrained(runs / name).eos_token_id
    assert AutoModelForSequenceClassification.from_pretrained(runs / "rm").config.num_labels == 1


def test_dvc_tracks_the_policy_and_its_status_is_clean(project):
    (pointer,) = (project.folder / "data/checkpoints").glob("ppo-*[0-9a-f].dvc")
    assert "run_key" in pointer.read_text()
    done = subprocess.run([sys.executable, "-m", "dvc", "status"], cwd=project.folder, capture_output=True, text=True)
    assert "up to date" in done.stdout, done.stdout + done.stderr


def test_cluster_status_names_engines_and_trainer_ranks_and_what_they_hold(project):
    done = subprocess.run(
        [sys.executable, "-m", "stages", "cluster", "status"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=project.environment | {"COLUMNS": "200"},
    )
    assert "engine-0" in done.stdout
    assert "rank 0/2" in done.stdout and "rank 1/2" in done.stdout
    assert "sft-" in done.stdout or "ppo-" in done.stdout


def test_a_second_run_has_nothing_to_do(project):
    began = time.monotonic()
    done = project.run("ppo_final")
    assert "Nothing to be done" in done.stdout + done.stderr
    assert time.monotonic() - began < 30  # a hang, not a benchmark


def test_a_deleted_iteration_comes_back_from_the_store_in_the_same_bytes(project, undisturbed):
    shutil.rmtree(project.artifact("ppo-*/0001"))
    project.run("ppo_final")
    assert project.manifests() == undisturbed
    assert project.statuses()[str(project.artifact("ppo-*/0001/update").relative_to(project.folder / "results/store"))] == "restored"


def test_a_deleted_iteration_is_computed_again_in_the_same_bytes_when_the_store_has_forgotten_it(project, undisturbed):
    shutil.rmtree(project.folder / ".dvc/cache/rlhf-runs")
    shutil.rmtree(project.artifact("ppo-*/0002"))
    before = project.statuses()
    project.run("ppo_final")
    assert project.manifests() == undisturbed
    changed = {name for name, status in project.statuses().items() if before.get(name) != status}
    assert any(name.endswith("0002/update") for name in changed)


def test_one_more_iteration_runs_exactly_one_more(project, undisturbed):
    done = project.run("ppo_final", "--config", "set=ppo.iterations=3")
    new = set(project.manifests()) - set(undisturbed)
    assert {name.split("/", 1)[1] for name in new if name.startswith("ppo-")} == {
        f"0003/{s}/manifest.json" for s in ("rollouts", "experience", "update")
    }
    assert not [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Job") and "0002" in line]


def test_the_same_configuration_in_another_folder_gives_equal_manifests(undisturbed, new_project):
    other = new_project()
    other.run("ppo_final")
    assert other.manifests() == undisturbed
    assert set(other.statuses().values()) == {"computed"}


def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(undisturbed, new_project):
    """kill -9 of Snakemake and of the rule's process in the middle of training, then the same command again."""
    killed = new_project()
    for _ in range(2):
        process = subprocess.Popen(
            killed.command("ppo_final"), cwd=killed.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, env=killed.environment,
        )  # fmt: skip
        done = len(killed.manifests())
        while len(killed.manifests()) < done + 4 and process.poll() is None:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    killed.run("ppo_final")
    assert killed.manifests() == undisturbed


def test_two_workflows_at_once_share_the_cluster_and_do_not_break_each_other(undisturbed, new_project):
    both = [new_project(), new_project()]
    running = [
        subprocess.Popen(
            p.command("ppo_final"), cwd=p.folder, env=p.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for p in both
    ]  # fmt: skip
    for process in running:
        said, _ = process.communicate()
        assert process.returncode == 0, said[-4000:]
    assert [p.manifests() for p in both] == [undisturbed, undisturbed]


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("ppo.kl_cof=0.1", "kl_coef"),
        ("ppo.kl_coef=fast", "models.ppo.kl_coef"),
        ("ppo.actor.learning_rate=-1", "models.ppo.actor.learning_rate"),
        ("ppo.reward=rmm", "'rm'"),
        ("data.demos.source=missing.jsonl", "data.demos.source"),
        ("sft.from=ppo", "cycle"),
        ("hardware.ranks=0", "hardware.ranks"),
        ("ipo.label_smoothing=0.1", "label_smoothing"),
        ("kto.data=demos", "models.kto.data"),
    ],
)
def test_a_wrong_configuration_gets_one_line_that_names_the_key(project, assignment, named):
    before = project.written()
    done = project.run("ppo_final", "--config", f"set={assignment}", ok=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert done.returncode != 0
    assert len(lines) == 1 and named in lines[0], done.stderr[-2000:]
    assert project.written() == before


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"question": "how is the tent?", "answer": "it is good."}\n', "no column 'prompt'"),
        ("", "is empty"),
        ('{"prompt": "' + "how is the tent? " * 100 + '", "response": "it is good."}\n', "longer than the context"),
    ],
)
def test_wrong_data_get_one_line_and_leave_nothing_half_written(project, content, named):
    (project.folder / "my.jsonl").write_text(content)
    before = {p for p in project.written() if p.is_file()}
    done = project.run("sft_final", "--config", "set=data.demos.source=my.jsonl,models.base.demonstrations=null", ok=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert done.returncode != 0
    assert len(lines) == 1 and named in lines[0], done.stderr[-3000:]
    assert all(p.parent.name.startswith("demos-") for p in project.written() if p.is_file() and p not in before)


def test_a_ray_address_where_nobody_listens_gets_one_line(project):
    done = project.run("ppo_final", "--config", "set=cluster.address=127.0.0.1:9,ppo.seed=9", ok=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert done.returncode != 0
    assert len(lines) == 1 and "127.0.0.1:9" in lines[0]
