"""Every method of the paper on the smaller world, from the same sft and data."""

import json

METHODS = {"rs", "dpo", "ipo", "cdpo", "kto", "iterative_dpo", "csft", "ppo", "grpo", "rloo"}


def test_every_method_ends_in_one_table_and_shared_parts_are_made_once(project):
    before = project.manifests()
    project.run("compare")
    rows = {row["model"]: row for row in json.loads((project.folder / "results/report/summary.json").read_text())}
    assert set(rows) == METHODS | {"sft"}
    assert {name: text for name, text in project.manifests().items() if name in before} == before
    assert all(rows[name]["kl"] != 0.0 for name in METHODS), "a method whose policy is still the reference has trained nothing"
    references = [name for name in project.manifests() if name.startswith("reference_")]
    assert len(references) == 2, "DPO, IPO and cDPO share one; KTO's has the mismatched pairs too"


def test_rejection_sampling_trains_on_the_tokens_that_were_sampled(project):
    project.run("rs_final")
    import pyarrow as pa

    def rows(path):
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all().to_pylist()

    folder = project.artifact("rs-*/0001")
    sampled = {tuple(r["response_ids"]): r["finish_reason"] for r in rows(folder / "rollouts/rollouts.arrow")}
    chosen = rows(folder / "selection/data.arrow")
    assert chosen and all(sampled[tuple(r["response_ids"])] == "stop" for r in chosen)
    facts = json.loads((folder / "selection/manifest.json").read_text())["facts"]
    assert facts["kept"] == len(chosen) and facts["mean_kept_score"] >= facts["mean_score"]


def test_the_common_table_never_mixes_what_was_judged_differently_and_shows_what_was_asked_for_last(project):
    summary = lambda: [row["model"] for row in json.loads((project.folder / "results/report/summary.json").read_text())]
    project.run("rs_final", "--config", "set=evaluation.seed=9")
    assert summary() == ["sft", "rs"]
    (said,) = [line for line in (project.folder / "results/report/summary.md").read_text().splitlines() if line.startswith("Not shown")]
    assert all(name in said for name in METHODS - {"rs"})
    assert "Nothing to be done" in project.run("compare").stderr
    assert set(summary()) == METHODS | {"sft"}
