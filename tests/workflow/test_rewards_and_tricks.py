"""PPO with other rewards and with state that is carried from iteration to iteration, through the whole workflow."""

import http.server
import json
import shutil
import threading

import pytest
import yaml

from stages import arrow

PPO = {"stage": "ppo", "from": "sft", "reward": "rm", "prompts": "prompts", "iterations": 2, "horizon": 4, "prompts_per_iteration": 32,
       "actor": {"batch_size": 16}, "critic": {"batch_size": 16}, "sampling": {"max_tokens": 24}}  # fmt: skip
FUNCTION = "def brevity(prompts, responses, references):\n    return [-len(r.split()) / 10 for r in responses]\n"


@pytest.fixture
def run(project, tmp_path):
    """Run a model `m` with these options (and other sections) in the tests' project, which has sft and rm already."""

    def run(options, ok=True, target="m_final", **sections):
        path = tmp_path / "more.yaml"
        path.write_text(yaml.safe_dump({"experiment": "tricks", "models": {"m": PPO | options, **sections.pop("models", {})}, **sections}))
        return project.run(target, files=[path], ok=ok)

    return run


def facts(project, pattern):
    return json.loads((project.artifact(pattern) / "manifest.json").read_text())["facts"]


def experience(project, k):
    return arrow.read(project.artifact(f"m-*/{k:04d}/experience") / "experience.arrow").to_pylist()


@pytest.fixture(autouse=True)
def one_run_at_a_time(project):
    yield
    for path in (project.folder / "results/store").glob("m-*"):
        shutil.rmtree(path)


def test_an_adaptive_coefficient_moves_by_the_kl_seen_and_is_part_of_the_experience(project, run):
    run({"kl_coef": 0.1, "kl_target": 100.0, "kl_horizon": 320.0})
    first, second = (facts(project, f"m-*/000{k}/experience") for k in (1, 2))
    assert first["means"]["kl_coef"] == 0.1
    assert second["means"]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * first["rows"] / 320))


def test_a_huge_kl_coefficient_pins_the_policy_to_its_reference(project, run):
    def kl(coefficient):
        run({"kl_coef": coefficient, "iterations": 6, "horizon": 12})
        found = facts(project, "m-*/0006/experience")["means"]["kl"]
        shutil.rmtree(project.artifact("m-*/0006").parent)
        return found

    free, held = kl(0.0), kl(100.0)
    assert abs(held) < 0.25 * free, (held, free)


def test_running_normalisation_goes_on_from_the_iteration_before(project, run):
    run({"reward_normalisation": "running"})
    raw = [dict(row["scores"])["rm"] for k in (1, 2) for row in experience(project, k)]
    state = facts(project, "m-*/0002/experience")["running"]
    assert state["count"] == len(raw) and state["mean"] == pytest.approx(sum(raw) / len(raw), abs=1e-6)


def test_a_function_and_a_model_are_weighted_and_keep_their_columns(project, run):
    (project.folder / "my.py").write_text(FUNCTION)
    run({"reward": {"my.py:brevity": 2.0, "rm": 0.5}})
    norm = facts(project, "rm-*")
    for row in experience(project, 1):
        scores = dict(row["scores"])
        assert scores["my.py:brevity"] == pytest.approx(-len(row["text"].split()) / 10)
        wanted = 2.0 * scores["my.py:brevity"] + 0.5 * (scores["rm"] - norm["mean"]) / norm["std"]
        assert row["score"] == pytest.approx(wanted, abs=1e-4)


def test_an_edited_reward_function_is_another_run(project, run):
    (project.folder / "my.py").write_text(FUNCTION)
    options = {"reward": "my.py:brevity", "reward_normalisation": "none", "critic_init": "policy", "iterations": 1}
    run(options)
    (project.folder / "my.py").write_text(FUNCTION.replace("/ 10", "/ 5"))
    run(options)
    assert len(list((project.folder / "results/store").glob("m-*"))) == 2


def test_a_failing_function_fails_the_rule_in_one_line_and_leaves_nothing(project, run):
    (project.folder / "my.py").write_text("def brevity(prompts, responses, references):\n    return [1.0]\n")
    done = run({"reward": "my.py:brevity", "reward_normalisation": "none", "critic_init": "policy", "iterations": 1}, ok=False)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert "my.py:brevity" in line and "1 scores for 32 responses" in line
    assert not list((project.folder / "results/store").glob("m-*/0001/experience"))


def test_a_service_scores_the_rollouts(project, run):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"rewards": [float(len(r)) for r in asked["responses"]]}).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/score"
    try:
        run({"reward": url, "reward_normalisation": "running", "critic_init": "policy", "iterations": 1})
    finally:
        server.shutdown()
        server.server_close()
    assert all(dict(row["scores"])[url] == len(row["text"]) for row in experience(project, 1))


def test_a_reward_model_with_another_tokenizer_scores_the_text(project, run):
    other = {"stage": "pretrain", "data": "corpus", "architecture": {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 128,
             "layers": 2, "heads": 2}, "optimizer": {"batch_size": 32}}  # fmt: skip
    judge = {"stage": "reward_model", "from": "other", "data": "preferences", "heldout": "heldout", "optimizer": {"batch_size": 32}}
    done = run({"reward": "judge", "critic_init": "policy", "iterations": 1}, models={"other": other, "judge": judge})
    assert "has another tokenizer: it scores the text" in done.stderr
    told = [
        (r["prompt"], r["text"], dict(r["scores"])["judge"]) for r in experience(project, 1) if r["finish_reason"] == "stop" and r["text"]
    ]
    prompt, text, score = told[0]
    said = project.rlhf("score", str(project.artifact("judge-*")), "--prompt", prompt, "--response", text)
    assert float(said.stdout.split()[0]) == pytest.approx(score, abs=1e-3)


def test_a_moving_average_of_the_actor_is_kept_beside_it(project, run):
    from safetensors.torch import load_file

    run({"ema_decay": 0.75})
    folders = [project.artifact("sft-*") / "model", *(project.artifact(f"m-*/000{k}/update") / "model" for k in (1, 2))]
    start, one, two = (load_file(folder / "model.safetensors") for folder in folders)
    average = load_file(project.artifact("m-*/0002/update") / "ema" / "model.safetensors")
    for name, found in average.items():
        wanted = 0.75 * (0.75 * start[name] + 0.25 * one[name]) + 0.25 * two[name]
        assert (found - wanted).abs().max() < 1e-5
    assert (project.folder / "results/runs/tricks/m-ema/config.json").exists()


def test_a_run_that_trains_nothing_says_so_and_fails_when_it_goes_on(project, run):
    (project.folder / "my.py").write_text("def zero(prompts, responses, references):\n    return [0.0] * len(prompts)\n")
    options = {"reward": "my.py:zero", "reward_normalisation": "none", "kl_coef": 0.0, "truncation_penalty": 0.0, "estimator": "rloo",
               "samples_per_prompt": 2, "prompts_per_iteration": 8, "iterations": 4}  # fmt: skip
    del_critic = {"critic": {}}
    done = run(options | del_critic, ok=False)
    assert done.stderr.count("warning: trains-nothing: all advantages are zero") == 3
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert "trains-nothing: 3 iterations in a row" in line
    assert len(list((project.folder / "results/store").glob("m-*/*/update/manifest.json"))) == 2


def test_filtering_that_leaves_nothing_is_said(project, run):
    (project.folder / "my.py").write_text("def zero(prompts, responses, references):\n    return [0.0] * len(prompts)\n")
    options = {"reward": "my.py:zero", "reward_normalisation": "none", "truncation_penalty": 0.0, "estimator": "grpo", "critic": {},
               "samples_per_prompt": 2, "prompts_per_iteration": 8, "filter_groups": True}  # fmt: skip
    done = run(options, ok=False)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("rlhf: error:")]
    assert "filter_groups leaves them all out" in line
