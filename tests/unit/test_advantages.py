"""From scores to advantages over a whole rollout: each estimator, filtering, and the engine's weights, on hand-worked values."""

import numpy as np
import pytest

from stages import advantages

OPTIONS = {
    "estimator": "gae", "filter_groups": False, "kl_estimator": "k1", "reward_clip": 10.0, "truncation_penalty": 1.0, "gamma": 1.0,
    "lam": 1.0, "whiten_advantages": False,
}  # fmt: skip


def compute(scores, lengths, *, groups=None, values=None, logprobs=None, reference=None, finished=None, kl_coef=0.0, **options):
    arrays = lambda given: [np.asarray(x, dtype=np.float32) for x in given]
    zeros = [[0.0] * n for n in lengths]
    return advantages.compute(
        scores=scores, finished=finished or [True] * len(scores), groups=groups or [str(i) for i in range(len(scores))],
        logprobs=arrays(logprobs or zeros), reference=arrays(reference or zeros), values=None if values is None else arrays(values),
        kl_coef=kl_coef, options=OPTIONS | options,
    )  # fmt: skip


def test_the_score_lies_on_the_last_token_and_the_kl_on_each():
    made = compute([2.0], [3], values=[[0, 0, 0]], logprobs=[[-1, -2, -0.5]], reference=[[-1.1, -1.7, -0.9]], kl_coef=0.1)
    assert np.allclose(made["rewards"][0], [-0.01, 0.03, 1.96], atol=1e-6)
    assert np.allclose(made["returns"][0], [1.98, 1.99, 1.96], atol=1e-6)
    assert made["means"]["kl"] == pytest.approx(0.2)


def test_a_response_that_did_not_end_by_itself_pays_and_one_that_did_does_not():
    made = compute([1.0, 1.0], [2, 2], values=[[0, 0], [0, 0]], finished=[True, False])
    assert [r[-1] for r in made["rewards"]] == [1.0, 0.0]
    assert [r[-1] for r in compute([1.0], [2], values=[[0, 0]], finished=[False], truncation_penalty=0.0)["rewards"]] == [1.0]


def test_scores_are_clipped_before_the_penalty():
    made = compute([50.0], [1], values=[[0]], finished=[False], reward_clip=3.0)
    assert made["rewards"][0][-1] == 2.0


def test_reinforce_pp_is_the_discounted_return_to_go_normalised_over_all_tokens():
    made = compute([1.0, 3.0], [1, 2], estimator="reinforce_pp", gamma=0.5)
    raw = np.array([1.0, 1.5, 3.0])  # one token; then half of three, and three
    wanted = (raw - raw.mean()) / raw.std()
    assert np.allclose(np.concatenate(made["advantages"]), wanted, atol=1e-5)


def test_rloo_compares_a_prompts_samples_with_each_other():
    made = compute([3.0, 1.0, 2.0, 0.0], [1, 1, 1, 1], groups=["p"] * 4, estimator="rloo")
    assert np.allclose(np.concatenate(made["advantages"]), [2.0, -0.666667, 0.666667, -2.0], atol=1e-6)


def test_filtering_leaves_out_prompts_without_signal_and_counts_them():
    scores, groups = [1.0, 1.0, 0.0, 2.0], ["same", "same", "other", "other"]
    kept = compute(scores, [1] * 4, groups=groups, estimator="grpo")
    assert kept["used"] == [True] * 4 and kept["means"]["groups_without_signal"] == 0.5 and kept["means"]["filtered"] == 0.0
    made = compute(scores, [1] * 4, groups=groups, estimator="grpo", filter_groups=True, whiten_advantages=True)
    assert made["used"] == [False, False, True, True] and made["means"]["filtered"] == 0.5
    assert np.allclose(np.concatenate(made["advantages"]), [0.0, 0.0, -1.0, 1.0], atol=1e-5)  # whitened over what is used


def test_explained_variance_is_one_for_a_critic_that_knows_and_none_for_a_constant():
    known = compute([1.0, 3.0], [1, 1], values=[[1.0], [3.0]])
    assert known["means"]["explained_variance"] == pytest.approx(1.0)
    assert compute([1.0, 3.0], [1, 1], values=[[2.0], [2.0]])["means"]["explained_variance"] == pytest.approx(0.0)


def test_whitening_uses_the_statistics_of_the_whole_rollout():
    made = compute([1.0, 2.0, 3.0, 4.0], [1] * 4, values=[[0.0]] * 4, whiten_advantages=True)
    assert np.allclose(np.concatenate(made["advantages"]), [-1.341641, -0.447214, 0.447214, 1.341641], atol=1e-5)


def test_engine_weights_are_ratios_within_their_range():
    weights = advantages.engine_weights(trainer=[[-1.0, -1.0], [-2.0]], engine=[[-1.0, -3.0], [-1.0]], kind="tis", low=0.5, high=2.0)
    assert np.allclose(weights[0], [1.0, 2.0]) and np.allclose(weights[1], [0.5])
