"""What is in an artifact's identity, and what is not."""

import copy
from pathlib import Path

import pytest
import yaml

from stages import config_check, config_docs, fingerprint, plan, targets
from stages.errors import UserError

ROOT = Path(__file__).parents[2]
DEFAULT = yaml.safe_load((ROOT / "config/config.yaml").read_text())


def planned(*assignments: str) -> plan.Plan:
    raw = copy.deepcopy(DEFAULT)
    if assignments:
        raw["set"] = ",".join(assignments)
    return plan.Plan(config_check.load(raw), ROOT)


def test_the_default_configuration_plans_every_method_of_the_paper():
    made = planned()
    assert {"base", "sft", "rm", "ppo", "rs", "dpo", "ipo", "cdpo", "kto", "iterative_dpo", "csft", "grpo", "rloo"} <= set(made.final)


def test_equal_configurations_have_equal_paths_and_jobs():
    one, other = planned(), planned()
    assert {p: n.job for p, n in one.nodes.items()} == {p: n.job for p, n in other.nodes.items()}


def test_a_changed_number_moves_what_depends_on_it_and_nothing_else():
    before, after = planned(), planned("ppo.kl_coef=0.05")
    assert before.final["rm"].path == after.final["rm"].path
    assert before.final["dpo"].path == after.final["dpo"].path
    assert before.final["ppo"].path != after.final["ppo"].path


def test_text_of_a_number_is_the_number():
    assert planned("ppo.kl_coef=3e-2").final["ppo"].path == planned("models.ppo.kl_coef=0.03").final["ppo"].path


def test_more_iterations_extend_the_same_folder():
    before, after = planned(), planned("ppo.iterations=10")
    assert {n for n in before.nodes if "/ppo-" in n and "evaluation" not in n} < set(after.nodes)
    new = [n for n in after.nodes if n not in before.nodes and "evaluation" not in n]
    assert sorted(n.split("/", 3)[3] for n in new) == sorted(
        f"{k}/{s}" for k in ("0009", "0010") for s in ("rollouts", "experience", "update")
    )


@pytest.mark.parametrize(
    "assignment",
    [
        "hardware.ranks=1",
        "hardware.zero_stage=3",
        "hardware.micro_batch_tokens=64",
        "hardware.compile=true",
        "hardware.recompute=true",
        "sft.save_every=7",
        "sft.save_minutes=1",
        "cluster.port=5",
    ],
)
def test_hardware_cluster_and_save_every_are_in_no_identity(assignment):
    assert set(planned().nodes) == set(planned(assignment).nodes)


def test_losses_on_the_same_data_share_the_reference_log_probabilities():
    made = planned()
    assert len({made.final[m].inputs["reference"].path for m in ("dpo", "ipo", "cdpo")}) == 1


def test_an_option_of_the_update_leaves_rollouts_and_experience_of_the_first_iteration_alone():
    first = lambda made, stage: next(n for n in made.nodes.values() if n.model == "ppo" and n.stage == stage)
    before, after = planned(), planned("ppo.clip_high=0.3")
    assert [first(before, s).plan_id == first(after, s).plan_id for s in ("rollouts", "experience", "update")] == [True, True, False]


def test_several_rewards_are_inputs_in_their_order_and_weights_are_in_the_identity():
    raw = copy.deepcopy(DEFAULT)
    raw["models"]["ppo"]["reward"] = {"rm": 1.0, "rm2": 0.5}
    raw["models"]["rm2"] = raw["models"]["rm"] | {"seed": 7}
    made = plan.Plan(config_check.load(raw), ROOT)
    experience = next(n for n in made.nodes.values() if n.model == "ppo" and n.stage == "experience")
    assert [experience.inputs[f"reward_{i}"].path for i in (0, 1)] == [made.final["rm"].path, made.final["rm2"].path]
    raw["models"]["ppo"]["reward"] = {"rm": 1.0, "rm2": 0.25}
    assert plan.Plan(config_check.load(raw), ROOT).final["ppo"].path != made.final["ppo"].path


def test_a_sweep_is_a_model_for_every_point_and_a_target():
    raw = copy.deepcopy(DEFAULT)
    raw["sweeps"] = {"s": {"model": "ppo", "grid": {"kl_coef": [0.1, 0.2], "actor.learning_rate": [1e-4]}, "seeds": [0, 1]}}
    made = plan.Plan(config_check.load(raw), ROOT)
    target = targets.targets(made)["s"]
    names = {f"s-kl_coef-{c}_learning_rate-0.0001-seed-{s}" for c in (0.1, 0.2) for s in (0, 1)}
    assert names == set(target.job["sweep"]) and len(set(target.job["sweep"].values())) == 2
    assert not names & set(targets.targets(made)["compare"].job["evaluations"])


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"model": "pp", "seeds": [1]}, "did you mean 'ppo'"),
        ({"model": "ppo"}, "nothing would vary"),
        ({"model": "ppo", "grid": {"kl_cof": [1]}}, "did you mean 'kl_coef'"),
        ({"model": "ppo", "grid": {"kl_coef": []}}, "no values"),
        ({"model": "ppo", "seed": [1]}, "sweeps: seed: unknown key"),
    ],
)
def test_a_wrong_sweep_is_one_line(sweep, said):
    raw = copy.deepcopy(DEFAULT)
    raw["sweeps"] = {"s": sweep}
    with pytest.raises(UserError) as caught:
        config_check.load(raw)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_options_of_a_method_without_a_critic_are_not_in_its_identity():
    params = next(n for n in planned().nodes.values() if n.model == "rloo" and n.stage == "update").params
    assert not {"critic", "lam", "gamma", "value_clip"} & set(params)


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("ppo.kl_cof=1", "did you mean 'kl_coef'"),
        ("hardwar.ranks=1", "did you mean 'hardware'"),
        ("hardware.compile=true,hardware.zero_stage=3", "cannot be compiled"),
        ("ppo.actor.learning_rat=1", "did you mean 'learning_rate'"),
        ("ppo.actor.learning_rate=-1", "greater than 0"),
        ("ppo.kl_coef=fast", "valid number"),
        ("ppo.kl_coef=nan", "finite"),
        ("ppo.reward=rmm", "did you mean 'rm'"),
        ("ppo.reward=sft", "is a sft"),
        ("dpo.data=demos", "holds demonstrations; wanted preferences"),
        ("sft.stage=sftt", "did you mean 'sft'"),
        ("ipo.label_smoothing=0.1", "not read by the ipo loss"),
        ("rloo.lam=0.9", "not read by estimator rloo"),
        ("rloo.samples_per_prompt=1", "2 or more"),
        ("rm.from=ppo", "cycle"),
        ("ppo.reward.rm=0.5", "models.ppo.reward holds 'rm' and no options of its own"),
        ("ppo.kl_coef.x=1", "holds"),
        ("ppo.reward=http://me:word@host/,ppo.reward_normalisation=none,ppo.critic_init=policy", "no password in an address"),
        ("ppo.kl_target=5,ppo.kl_horizon=50", "could reach 0"),
        ("ppo.kl_target=5,ppo.kl_coef=0", "0 stays 0"),
        ("data.demos.columns.prompt=question", "not read with source synthetic"),
        ("ppo.filter_groups=true", "filter_groups compares a prompt's samples; give 2 or more"),
        ("ppo.kl_horizon=5", "not read without kl_target"),
        ("ppo.engine_range=1", "engine_range"),
        ("ppo.ptx_coef=0.1", "name a data set"),
        ("ppo.ptx_data=demos", "not read without ptx_coef"),
        ("ppo.dual_clip=0.5", "greater than 1"),
        ("ppo.kl_target=0", "greater than 0"),
        ("ppo.kl_loss_estimator=k1", "kl_loss_estimator"),
        ("rloo.critic_init=policy", "not read by estimator rloo"),
        ("ppo.reward=nowhere.py:f,ppo.reward_normalisation=none,ppo.critic_init=policy", "no file 'nowhere.py'"),
        ("ppo.reward=http://127.0.0.1:1/", "choose running or none"),
        ("data.demos.source=nowhere.jsonl", "no file 'nowhere.jsonl'"),
        ("base.architecture.heads=3", "does not divide"),
        ("sft.from=ppo", "cycle"),
        ("ppo.iterations", "section.key=value"),
    ],
)
def test_a_fault_is_one_line_with_the_key_and_the_remedy(assignment, said):
    with pytest.raises(UserError) as caught:
        planned(assignment)
    assert "\n" not in str(caught.value)
    assert said in str(caught.value)


def test_documentation_and_schema_are_what_the_types_say():
    assert (ROOT / config_docs.README).read_text() == config_docs.readme(), "run: rlhf config --write"
    assert (ROOT / config_docs.SCHEMA).read_text() == config_docs.schema(), "run: rlhf config --write"


def test_comments_and_docstrings_do_not_change_a_fingerprint_and_code_does(tmp_path, monkeypatch):
    package = tmp_path / "stages"
    package.mkdir()
    monkeypatch.setattr(fingerprint, "ROOT", package)

    def forget() -> None:
        fingerprint._parsed.cache_clear()
        fingerprint.fingerprint.cache_clear()

    def of(text: str) -> str:
        (package / "one.py").write_text(text)
        forget()
        return fingerprint.fingerprint("stages.one")

    (package / "two.py").write_text("X = 1\n")
    first = of("from stages.two import X\n")
    assert of('"""Said."""\n# noted\nfrom stages.two import X\n') == first
    assert of("from stages.two import X\nY = 2\n") != first
    (package / "two.py").write_text("X = 2\n")
    assert of("from stages.two import X\n") != first
    forget()


def test_a_loss_named_in_a_string_is_part_of_the_stage_that_names_it_and_of_no_other():
    of = lambda stage: fingerprint.modules(*plan.STAGES[stage].code)
    assert "stages.algorithms.kto" in of("kto")
    assert [s for s in plan.STAGES if "stages.algorithms.kto" in of(s)] == ["kto"]
    assert [s for s in plan.STAGES if "stages.algorithms.preference" in of(s)] == ["dpo"]
    assert "stages.algorithms.ppo" not in of("sft")


def test_whatever_computes_on_the_cluster_has_engines_and_trainers_in_its_code_and_no_plumbing():
    for name, stage in plan.STAGES.items():
        modules = fingerprint.modules(*stage.code)
        assert ("stages.cluster.engine" in modules) == ("stages.cluster.trainer" in modules) == bool(stage.packages), name
        assert not {"stages.config", "stages.plan", "stages.store", "stages.runner", "stages.cluster.head"} & modules.keys()


def test_iterations_take_every_prompt_of_a_pass_at_most_once_and_none_twice_in_one():
    from stages.rollouts import window

    for total, size in ((10, 3), (10, 10), (7, 2), (4096, 384)):
        windows = [window(total, size, k, seed=1) for k in range(1, 3 * (total // size) + 1)]
        assert all(len(set(w)) == size for w in windows)
        a_pass = [i for w in windows[: total // size] for i in w]
        assert len(set(a_pass)) == len(a_pass)
        assert windows[0] != windows[total // size]


def test_every_stage_is_a_module_with_a_run_function():
    for stage in plan.STAGES.values():
        assert "def run(context)" in (ROOT / f"{stage.module.replace('.', '/')}.py").read_text()


def test_planning_and_the_thin_client_import_no_heavy_package():
    import subprocess
    import sys

    code = (
        "import sys; from stages import plan, config, client, jobs, runner, store, report, pointers, resolve; "
        "print([m for m in ('torch', 'transformers', 'vllm', 'deepspeed', 'ray') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout.strip() == "[]"
