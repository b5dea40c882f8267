"""Best-of-n choice and pairs."""

import pytest

from stages.algorithms.best_of_n import best_of_n, pair_best_worst, top_share

IDS = ["p0"] * 4 + ["p1"] * 2
REWARDS = [0.2, 0.9, 0.9, 0.1, 0.5, 0.5]


def test_the_first_of_tied_samples_is_best():
    assert best_of_n(IDS[:4], REWARDS[:4]) == {"p0": 1}
    assert best_of_n(IDS[4:], REWARDS[4:]) == {"p1": 0}
    assert best_of_n(IDS, REWARDS) == {"p0": 1, "p1": 4}


def test_a_pair_is_best_and_worst_and_equal_rewards_make_none():
    assert pair_best_worst(IDS, REWARDS) == {"p0": (1, 3)}
    assert pair_best_worst(["p"] * 3, [1.0, 0.0, 0.0]) == {"p": (0, 1)}


def test_two_prompts_of_one_text_are_two_rows():
    text = {"p0": "same", "p1": "same"}
    assert len(best_of_n(list(text), [0.1, 0.2])) == 2


def test_a_nan_reward_is_an_error_that_names_the_prompt():
    for choose in (best_of_n, pair_best_worst):
        with pytest.raises(ValueError, match=r"NaN reward for prompts \['p1'\]"):
            choose(IDS, [*REWARDS[:5], float("nan")])


def test_a_short_answer_of_a_reward_service_is_an_error():
    with pytest.raises(ValueError, match="6 prompt ids for 5"):
        best_of_n(IDS, REWARDS[:5])


def test_the_top_share_is_taken_over_all_rows_and_ties_go_to_the_lower_row():
    assert top_share([0.2, 0.9, 0.9, 0.1, 0.5], 0.4) == [1, 2]
    assert top_share([1.0, 1.0, 1.0], 0.34) == [0, 1]
    assert top_share([3.0], 0.01) == [0]


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_outside_of_zero_to_one_is_an_error(share):
    with pytest.raises(ValueError, match="share must lie"):
        top_share([1.0], share)


def test_a_reward_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match=r"NaN reward in rows \[1\]"):
        top_share([1.0, float("nan")], 0.5)
