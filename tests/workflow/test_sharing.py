"""Never compute twice, never trust blindly, lose nothing: the run cache, DVC remotes, damage, sweeps, reruns."""

import base64
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stages import manifest

ROOT = Path(__file__).parents[2]
NOTHING = "Nothing to be done"


def dvc(project, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], cwd=project.folder, env=project.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def clone_of(project, new_project):
    """Another machine's clone: git brings pointers, and nothing else."""
    clone = new_project()
    (clone.folder / "data/checkpoints").mkdir(parents=True)
    for pointer in (project.folder / "data/checkpoints").glob("*.dvc"):
        shutil.copy(pointer, clone.folder / "data/checkpoints")
    return clone


@pytest.fixture(scope="module")
def finished(new_project):
    """A finished run of its own, and its manifests."""
    made = new_project()
    made.run("ppo_final")
    made.expected = made.manifests()
    return made


@pytest.fixture(scope="module")
def remotes(finished, tmp_path_factory):
    """Kind of remote -> what `dvc remote` and the environment need for it; pushed to already."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    import boto3

    boto3.client(
        "s3", endpoint_url=f"http://{host}:{port}", aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    ).create_bucket(Bucket="models")

    def local(project):
        dvc(project, "remote", "add", "-d", "shared", str(folder))

    def s3(project):
        project.environment |= keys
        dvc(project, "remote", "add", "-d", "shared", "s3://models/rlhf")
        dvc(project, "remote", "modify", "shared", "endpointurl", f"http://{host}:{port}")

    folder = tmp_path_factory.mktemp("remote")
    found = {"folder": local, "s3": s3}
    for configure in found.values():
        configure(finished)
        dvc(finished, "push")
        dvc(finished, "remote", "remove", "shared")
    yield found
    server.stop()


def test_everything_is_linked_back_after_results_are_deleted(finished):
    shutil.rmtree(finished.folder / "results")
    dry = finished.run("-n", "ppo_final")
    assert "17 artifacts: 0 in place, 17 to link from the cache, 0 to compute" in dry.stderr
    assert not (finished.folder / "results/store").exists()  # a dry run changes nothing
    done = finished.run("ppo_final")
    assert NOTHING in done.stderr and finished.manifests() == finished.expected
    assert "up to date" in dvc(finished, "status")


def test_a_mark_that_snakemake_left_behind_takes_no_finished_result_away(finished):
    """On a full disk it can neither note that a job has ended nor take its mark back."""
    made = finished.artifact("evaluation-sft-*").relative_to(finished.folder) / "manifest.json"
    (finished.folder / ".snakemake/incomplete" / base64.urlsafe_b64encode(str(made).encode()).decode()).write_text(
        '{"external_jobid": null}'
    )
    done = finished.run("ppo_final")
    assert NOTHING in done.stderr and finished.manifests() == finished.expected


def test_a_report_that_was_cut_off_is_made_whole(finished):
    report = finished.folder / "results/report"
    whole = {path.name: path.read_text() for path in report.iterdir()}
    for lost in ("ppo.md", "summary.json", "ppo.json"):
        (report / lost).unlink()
        assert NOTHING in finished.run("ppo_final").stderr
        assert {path.name: path.read_text() for path in report.iterdir()} == whole


def flip(victim: Path, at: int) -> None:
    """Change a byte of a file in place: with hard links, of the cache's own object."""
    victim.chmod(0o644)
    with victim.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_fresh_clone_restores_from_the_remote_what_it_needs_and_no_more(finished, remotes, new_project, kind):
    clone = clone_of(finished, new_project)
    remotes[kind](clone)
    assert "3 to fetch from the remote 'shared', 14 not needed, 0 to compute" in clone.run("-n", "ppo_final").stderr
    done = clone.run("ppo_final")
    assert NOTHING in done.stderr
    there = clone.manifests()
    assert len(there) == 3 and there.items() <= finished.expected.items()  # the policy and two evaluations
    assert json.loads((clone.folder / "results/report/summary.json").read_text())
    assert NOTHING in clone.run("ppo_final").stderr


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_fresh_clone_after_dvc_pull_has_nothing_to_do_even_without_the_remote(finished, remotes, new_project, kind):
    clone = clone_of(finished, new_project)
    remotes[kind](clone)
    dvc(clone, "pull")
    dvc(clone, "remote", "remove", "shared")
    assert NOTHING in clone.run("ppo_final").stderr
    assert clone.manifests().items() <= finished.expected.items()
    assert "up to date" in dvc(clone, "status")


def test_a_clone_goes_on_from_the_remote_with_more_iterations(finished, remotes, new_project):
    clone = clone_of(finished, new_project)
    remotes["folder"](clone)
    clone.run("ppo_final", "--config", "set=ppo.iterations=3")
    computed = {path for path, status in clone.statuses().items() if status == "computed"}
    trained = {path for path in computed if path.split("-")[0] not in ("prompts", "eval_prompts", "evaluation")}
    assert {re.sub(r"-\w+/", "/", path) for path in trained} == {f"ppo/0003/{stage}" for stage in ("rollouts", "experience", "update")}


def test_a_damaged_history_is_not_believed(finished, remotes, new_project):
    clone = clone_of(finished, new_project)
    remotes["folder"](clone)
    dvc(clone, "pull")
    (pointer,) = (clone.folder / "data/checkpoints").glob("ppo-*.evaluation.dvc")
    oid = next(o["md5"] for o in yaml.safe_load(pointer.read_text())["outs"] if o["path"].endswith(".jsonl"))
    flip(clone.folder / f".dvc/cache/files/md5/{oid[:2]}/{oid[2:]}", 100)
    assert NOTHING in clone.run("ppo_final").stderr  # fetched again
    assert (clone.folder / ".dvc/cache/quarantine" / oid).exists() or (clone.folder / ".dvc/cache/files/quarantine" / oid).exists()


def test_a_remote_that_cannot_be_reached_is_named(finished, new_project):
    clone = clone_of(finished, new_project)
    clone.environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_MAX_ATTEMPTS": "1"}
    dvc(clone, "remote", "add", "-d", "shared", "s3://models/rlhf")
    dvc(clone, "remote", "modify", "shared", "endpointurl", "http://127.0.0.1:9")
    done = clone.run("ppo_final", ok=False)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert done.returncode and "'shared'" in line


@pytest.mark.parametrize(
    "pattern", ["base-*/model/model.safetensors", "ppo-*/0001/rollouts/rollouts.arrow", "ppo-*/0002/update/optimizer/actor.*"]
)
def test_a_flipped_byte_in_the_cache_is_found_named_quarantined_and_recomputed(finished, pattern):
    victim = finished.artifact(pattern)
    flip(victim, random.Random(pattern).randrange(victim.stat().st_size))
    shutil.rmtree(finished.folder / "results")
    done = finished.run("ppo_final")
    (line,) = [line for line in done.stderr.splitlines() if "damaged" in line and "quarantine" in line]
    assert str(victim.relative_to(finished.folder).parts[2]) in line
    assert finished.manifests() == finished.expected


def test_verify_finds_damage_in_place_and_the_next_run_makes_it_good(finished):
    victim = finished.artifact("sft-*/model/model.safetensors")
    flip(victim, 1000)
    found = finished.rlhf("verify", ok=False)
    assert found.returncode == 1 and "model/model.safetensors damaged" in found.stdout
    finished.run("ppo_final")
    assert finished.manifests() == finished.expected
    assert finished.rlhf("verify").returncode == 0


def test_switching_a_parameter_away_and_back_computes_only_the_way_there(finished):
    finished.run("ppo_final", "--config", "set=ppo.kl_coef=0.3")
    away = {p for p in finished.manifests() if p not in finished.expected}
    shutil.rmtree(finished.folder / "results/store")
    finished.run("ppo_final")
    assert finished.manifests() == finished.expected
    done = finished.run("-n", "ppo_final", "--config", "set=ppo.kl_coef=0.3")
    assert f"{len(away)} to link from the cache, 0 to compute" in done.stderr


def test_a_sweep_computes_what_its_points_share_once(finished):
    sweep = ROOT / "config/sweeps/kl_coef.yaml"
    done = finished.run("kl_coef", files=[sweep])
    assert not re.findall(r"^Job \d+: (?:data|pretrain|sft|reward model) .*", done.stderr, re.MULTILINE)
    rollouts = [status for p, status in finished.statuses().items() if p.startswith("kl_coef") and p.endswith("0001/rollouts")]
    assert rollouts == ["restored"] * 4  # the first rollouts come from sft at every point
    links = {p.name for p in (finished.folder / "results/runs/kl_coef").iterdir()}
    assert {"kl_coef-0.0", "kl_coef-0.02", "kl_coef-0.06", "kl_coef-0.2"} <= links
    report = (finished.folder / "results/report/kl_coef.md").read_text()
    assert all(report.count(f"\n- kl_coef-kl_coef-{value} (") == 4 for value in ("0.0", "0.02", "0.06", "0.2"))  # answers to four prompts
    assert NOTHING in finished.run("kl_coef", files=[sweep]).stderr


def test_a_run_that_keeps_few_optimizers_frees_the_others_as_it_goes_and_ends_in_the_same_bytes(finished, new_project):
    other = new_project()
    shutil.copytree(finished.folder / ".dvc/cache", other.folder / ".dvc/cache", dirs_exist_ok=True)
    other.run("ppo_final", "--config", "set=ppo.iterations=1")
    other.run("ppo_final", "--config", "set=ppo.seed=7,ppo.iterations=4,ppo.keep_optimizers=2")
    runs = {path.parents[1] for path in (other.folder / "results/store").glob("ppo-*/0004/update")}
    (run,) = runs
    assert [k for k in range(1, 5) if list((run / f"{k:04d}/update/optimizer").glob("*"))] == [2, 3, 4]
    freed = json.loads((run / "0001/update/manifest.json").read_text())
    record = json.loads((other.folder / f".dvc/cache/rlhf-runs/{freed['key'][:2]}/{freed['key']}.json").read_text())
    assert {n for n in freed["outputs"] if n not in record["files"]} == {"optimizer/actor.safetensors", "optimizer/critic.safetensors"}
    untouched = {p.parents[3].name for p in (other.folder / "results/store").glob("ppo-*/0001/update/optimizer/*")}
    assert len(untouched) == 1 and run.name not in untouched, "of the other run, nothing is freed"
    assert "whole" in other.rlhf("verify").stdout
    assert NOTHING in other.run("ppo_final", "--config", "set=ppo.seed=7,ppo.iterations=4").stderr, "how many are kept is no one's identity"
    before = other.manifests()
    shutil.rmtree(run / "0002")
    shutil.rmtree(other.folder / ".dvc/cache/rlhf-runs")
    other.run("ppo_final", "--config", "set=ppo.seed=7,ppo.iterations=4")  # makes the freed state again, to go on from it
    assert other.manifests() == before


def test_gc_frees_what_nothing_names_and_the_run_goes_on_afterwards(finished):
    before = finished.rlhf("gc", "-n", "--configfile", str(finished.config))
    assert "optimizer states" in before.stdout
    finished.rlhf("gc", "--yes", "--configfile", str(finished.config))
    assert not (finished.artifact("ppo-*/0001/update") / "optimizer").exists() or not list(
        finished.artifact("ppo-*/0001/update/optimizer").iterdir()
    )
    assert NOTHING in finished.run("ppo_final").stderr
    assert "nothing to free" in finished.rlhf("gc", "-n", "--configfile", str(finished.config)).stdout
    finished.run("ppo_final", "--config", "set=ppo.iterations=3")  # from the last optimizer, which was kept
    assert finished.expected.items() <= finished.manifests().items()
    shutil.rmtree(finished.artifact("ppo-*/0002"))
    shutil.rmtree(finished.folder / ".dvc/cache/rlhf-runs")
    finished.run("ppo_final")  # makes the trimmed optimizer of 0001 again, for 0002 to go on from
    assert {k: v for k, v in finished.manifests().items() if k in finished.expected} == finished.expected


def test_gc_waits_for_a_workflow_whose_results_nothing_names_yet(finished):
    running = subprocess.Popen(
        finished.command("ppo_final", "--config", "set=ppo.seed=91"), cwd=finished.folder, env=finished.environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in running.stderr:
        if "Finished jobid" in line:
            break
    assert "a workflow is running here" in finished.rlhf("gc", "-n", "--configfile", str(finished.config)).stdout
    refused = finished.rlhf("gc", "--yes", "--configfile", str(finished.config), ok=False)
    assert refused.returncode != 0 and "is running here" in refused.stderr
    running.stderr.read()
    assert running.wait() == 0


def test_dvc_diff_shows_a_grown_run_and_dvc_gc_keeps_what_pointers_name(finished, new_project):
    other = new_project()
    git = "git -c user.name=t -c user.email=t@t"
    shutil.copytree(finished.folder / ".dvc/cache", other.folder / ".dvc/cache", dirs_exist_ok=True)
    subprocess.run("git init -q && printf 'results/\\n*.jsonl\\n.snakemake/\\n' > .gitignore", shell=True, cwd=other.folder, check=True)
    dvc(other, "config", "core.no_scm", "false")
    other.run("ppo_final")
    subprocess.run(f"git add -A && {git} commit -qm two", shell=True, cwd=other.folder, check=True)
    assert dvc(other, "diff").strip() == ""
    other.run("ppo_final", "--config", "set=ppo.iterations=3")
    assert "0003/update/model" in dvc(other, "diff")
    dvc(other, "gc", "-w", "-f")
    assert "up to date" in dvc(other, "status")
    shutil.rmtree(other.folder / "results")
    done = other.run("ppo_final", "--config", "set=ppo.iterations=3")
    assert NOTHING in done.stderr and "up to date" in dvc(other, "status")  # what pointers name was all that was needed


def test_explain_names_the_parameter_that_two_artifacts_differ_in(finished):
    said = finished.rlhf("explain", "ppo", "kl_coef/kl_coef-0.2", "--configfile", str(finished.config)).stdout
    assert "parameter kl_coef: 0.06 -> 0.2" in said
    said = finished.rlhf("explain", "ppo", "--configfile", str(finished.config), "--set", "ppo.kl_coef=0.5").stdout
    assert re.search(r"0001/experience: not made yet; \S+ has kl_coef 0\.\d+ -> 0\.5", " ".join(said.split()).replace("│ ", ""))


def test_lineage_shows_the_way_from_the_data_to_the_policy(finished):
    said = finished.rlhf("lineage", "ppo", "--configfile", str(finished.config)).stdout
    for part in ("corpus-", "base-", "sft-", "rm-", "preferences-", "seed 0", "torch 2", "iterations 1 to 1"):
        assert part in said


def test_a_frozen_run_is_made_again_elsewhere_with_the_same_keys(project, new_project):
    frozen = project.folder / "ppo.freeze.yaml"
    project.rlhf("freeze", "ppo")
    other = new_project()
    done = other.rlhf("rerun", str(frozen))
    assert "with the same key and the same bytes" in done.stdout
    content = yaml.safe_load(frozen.read_text())
    content["artifacts"][next(p for p in content["artifacts"] if "/sft-" in p)]["content"] = "0"
    frozen.write_text(yaml.safe_dump(content))
    done = other.rlhf("rerun", str(frozen), ok=False)
    assert done.returncode == 1 and "the same key, other bytes" in done.stdout


def test_gc_spares_what_the_user_tracks_and_a_run_that_is_not_in_place(finished):
    (finished.folder / "mine.txt").write_text("not to be lost " * 100)
    dvc(finished, "add", "mine.txt")
    shutil.rmtree(finished.folder / "results")
    finished.rlhf("gc", "--yes", "--configfile", str(finished.config))
    (finished.folder / "mine.txt").unlink()
    dvc(finished, "checkout", "mine.txt")
    finished.run("ppo_final")
    assert finished.expected.items() <= finished.manifests().items()
    assert "computed" not in {status for path, status in finished.statuses().items() if f"{path}/manifest.json" in finished.expected}


def test_a_lost_iteration_after_gc_is_made_again_with_the_optimizer_that_was_trimmed(finished):
    finished.rlhf("gc", "--yes", "--configfile", str(finished.config))
    record = json.loads((finished.artifact("ppo-*/0002/update") / "manifest.json").read_text())["key"]
    (finished.folder / f".dvc/cache/rlhf-runs/{record[:2]}/{record}.json").unlink()
    shutil.rmtree(finished.artifact("ppo-*/0002/update"))
    finished.run("ppo_final")
    assert finished.expected.items() <= finished.manifests().items()


def test_weights_exchanged_in_place_are_noticed_though_their_size_is_the_same(finished):
    victim = finished.artifact("ppo-*/0002/update") / "model/model.safetensors"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.unlink()  # not the cache's object, only the link to it
    victim.write_bytes(content)
    done = finished.run("ppo_final")
    assert "1 linked from the cache" in done.stderr
    assert finished.expected.items() <= finished.manifests().items()
    assert (
        manifest.hash_file(victim)
        == json.loads((victim.parents[1] / "manifest.json").read_text())["outputs"]["model/model.safetensors"]["sha256"]
    )
