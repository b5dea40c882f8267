"""The engine says what transformers and the trainer say, after every change of its weights."""

import contextlib
import functools

import numpy as np
import pytest
import ray
import torch

from stages.cluster.rows import Rows

from .stack import fresh, sequences

# the last fills a block of the prefix cache, which is of 128 tokens on a CPU
PROMPTS = [prompt for prompt, _ in (*sequences(7, prompt=(1, 20)), *sequences(1, prompt=(150, 150)))]
SEEDS = [2**40 + i for i in range(len(PROMPTS))]
LENGTH = 16


def generate(engine, folder, prompts=PROMPTS, seeds=SEEDS, *, temperature=0.7, max_tokens=LENGTH, stop=(), **options):
    return engine.generate(
        f"policy {folder}", folder, "float32", prompts, seeds, temperature=temperature, max_tokens=max_tokens, stop=list(stop),
        phase="test", **options,
    )  # fmt: skip


@functools.cache
def greedy(folder):
    """Greedy tokens of transformers for each prompt, never stopping."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.eos_token_id = None
    answer = lambda prompt: model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH)[0, len(prompt) :].tolist()
    return [answer(prompt) for prompt in PROMPTS]


def test_greedy_answers_come_beside_the_sampled_ones_which_they_do_not_change(engine, policies):
    folder, few = policies["tied"][0], 5
    for kept in ({}, {i: ([7], [-1.0], "length") for i in range(len(PROMPTS))}):
        made = generate(engine, folder, finished=kept, greedy=PROMPTS[:few], greedy_tokens=8)
        assert made[: len(PROMPTS)] == (list(kept.values()) or generate(engine, folder))
        assert [ids for ids, _, _ in made[len(PROMPTS) :]] == [ids[:8] for ids in greedy(folder)[:few]]


@pytest.mark.parametrize("which", ["untied", "tied"])
def test_greedy_tokens_are_those_of_transformers_after_the_start_and_after_each_reload(engine, policies, which):
    hows = []
    for folder in (*policies[which], policies[which][0]):
        engine.context.info.clear()
        made = generate(engine, folder, temperature=0.0)
        hows.append(engine.context.info["weight_sync"][0][0]["how"])
        assert [ids for ids, _, _ in made] == greedy(folder)
    assert hows == ["started", "reloaded", "reloaded", "reloaded"]


def test_weights_that_a_zero_3_group_saved_arrive(engine, pair, policies):
    with pair.hardware(zero_stage=3):
        made = pair.fit(fresh(policies["tied"][1]), Rows.of(sequences(12)))
    assert [ids for ids, _, _ in generate(engine, made.folder, temperature=0.0)] == greedy(made.folder)


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_log_probabilities_of_sampled_tokens_are_the_trainers_at_the_temperature(engine, solo, policies, which):
    folder = policies[which][2]
    made = generate(engine, folder)
    rows = Rows.of([(prompt, ids) for prompt, (ids, _, _) in zip(PROMPTS, made)])
    scored = solo.score("actor", fresh(folder), rows, select="before", temperature=0.7)
    assert max(float(np.abs(np.array(logprobs) - s).max()) for (_, logprobs, _), s in zip(made, scored)) < 1e-4
    unscaled = solo.score("actor", fresh(folder), rows, select="before", temperature=1.0)
    assert max(float(np.abs(np.array(logprobs) - s).max()) for (_, logprobs, _), s in zip(made, unscaled)) > 1e-2


def test_tokens_and_log_probability_bits_do_not_depend_on_batch_size_or_order(engine, policies):
    folder = policies["tied"][0]
    together = generate(engine, folder)
    backwards = generate(engine, folder, PROMPTS[::-1], SEEDS[::-1])[::-1]
    with _few_at_a_time(engine, 3):
        by_threes = generate(engine, folder)
    alone = [generate(engine, folder, [prompt], [seed])[0] for prompt, seed in list(zip(PROMPTS, SEEDS))[:3]]
    assert together == backwards == by_threes and together[:3] == alone
    assert len({tuple(ids) for ids, _, _ in together}) == len(PROMPTS)
    assert generate(engine, folder, seeds=[seed + 1 for seed in SEEDS]) != together


def test_an_answer_is_stopped_by_the_end_token_which_it_keeps_or_cut_without_one(engine, policies):
    folder = policies["tied"][0]
    free = generate(engine, folder)
    end = free[0][0][10]
    for (ids, logprobs, reason), (long_ids, _, long_reason) in zip(generate(engine, folder, stop=[end]), free):
        assert long_reason == "length" and len(long_ids) == LENGTH
        if end in long_ids:
            assert reason == "stop" and ids == long_ids[: long_ids.index(end) + 1]
        else:
            assert reason == "length" and ids == long_ids
        assert len(logprobs) == len(ids)
    # the end token as the last that fits
    first = free[0][0].index(end)
    assert generate(engine, folder, PROMPTS[:1], SEEDS[:1], stop=[end], max_tokens=first + 1)[0][::2] == (free[0][0][: first + 1], "stop")
    assert generate(engine, folder, PROMPTS[:1], SEEDS[:1], stop=[end], max_tokens=first)[0][::2] == (free[0][0][:first], "length")


@contextlib.contextmanager
def _few_at_a_time(engine, count):
    """The engine answers so many prompts at once."""

    def limit(actor, count):
        before, actor.settings = actor.settings["max_num_seqs"], actor.settings | {"max_num_seqs": count}
        return before

    (actor,) = engine._engines()
    before = ray.get(actor.__ray_call__.remote(limit, count))
    yield
    ray.get(actor.__ray_call__.remote(limit, before))


def test_answers_are_kept_as_they_come_and_those_of_a_run_that_was_cut_off_are_not_asked_again(engine, policies):
    """With an engine whose every step takes a while."""
    folder = policies["tied"][0]
    prompts, seeds = PROMPTS[:7] * 6, list(range(42))
    whole = generate(engine, folder, prompts, seeds)
    (actor,) = engine._engines()
    kept, asked = {}, []

    def keep(new):
        kept.update(new)
        engine.context.check = cut

    def cut():
        raise KeyboardInterrupt

    check = engine.context.check
    with _few_at_a_time(engine, 6):
        ray.get(actor.__ray_call__.remote(_slow, 0.05))
        with pytest.raises(KeyboardInterrupt):
            generate(engine, folder, prompts, seeds, keep=keep, asking=asked.append)
        engine.context.check = check
        assert 0 < len(kept) < len(prompts) and all(kept[i] == whole[i] for i in kept)
        assert len(kept) <= asked[-1] <= len(kept) + 6
        ray.get(actor.__ray_call__.remote(_slow, 0.0))
        rest = {}
        assert generate(engine, folder, prompts, seeds, finished=kept, keep=rest.update) == whole
    assert rest.keys() == set(range(len(prompts))) - kept.keys(), "what was begun when it was cut off is begun again"


def _slow(actor, seconds):
    import time

    core = actor.llm.llm_engine
    core.step = lambda: time.sleep(seconds) or type(core).step(core)


def test_an_engine_that_nobody_listens_to_stops(engine, policies):
    folder = policies["tied"][0]
    generate(engine, folder, PROMPTS[:1], SEEDS[:1])
    (actor,) = engine._engines()
    with _few_at_a_time(engine, 1):
        ray.get([actor.__ray_call__.remote(_patience, 0.3), actor.__ray_call__.remote(_slow, 0.05)])
        asked = [(i, PROMPTS[0], i, 1.0, LENGTH) for i in range(20)]
        left = ray.get(actor.generate.remote(f"policy {folder}", asked, stop=[], token="gone"))
        ray.get([actor.__ray_call__.remote(_patience, 60.0), actor.__ray_call__.remote(_slow, 0.0)])
    assert len(left) < 3
    assert len(generate(engine, folder)) == len(PROMPTS), "and then answers others"


def test_what_an_engine_gave_up_because_it_was_not_asked_for_a_while_is_asked_again(engine, policies, monkeypatch):
    folder = policies["tied"][0]
    whole = generate(engine, folder)
    (actor,) = engine._engines()
    ray.get([actor.__ray_call__.remote(_patience, 0.2), actor.__ray_call__.remote(_slow, 0.05)])
    said = []

    def log(message):
        said.append(message)
        ray.get([actor.__ray_call__.remote(_patience, 60.0), actor.__ray_call__.remote(_slow, 0.0)])

    monkeypatch.setattr(engine.context, "log", log)
    assert generate(engine, folder) == whole
    assert said == ["the engines were not asked for a minute and gave up; what is left is asked again"]


def _patience(actor, seconds):
    from stages.cluster import engine

    engine._ABANDONED_S = seconds


def test_asking_for_weights_that_the_engine_does_not_hold_is_an_error(engine, policies):
    generate(engine, policies["tied"][0], PROMPTS[:1], SEEDS[:1])
    (actor,) = engine._engines()
    with pytest.raises(RuntimeError, match=r"engine holds policy .*tied-11, not another"):
        ray.get(actor.generate.remote("another", [(0, PROMPTS[0], 1, 1.0, 2)], stop=[], token="a"))


def test_an_engine_whose_reload_failed_holds_nothing(engine, policies, tmp_path):
    folder = policies["tied"][0]
    generate(engine, folder, PROMPTS[:1], SEEDS[:1])
    (actor,) = engine._engines()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(actor.load.remote("broken", str(tmp_path), "float32"))
    assert ray.get(actor.describe.remote())["holds"] == {}
    assert [ids for ids, _, _ in generate(engine, folder, temperature=0.0)] == greedy(folder)
