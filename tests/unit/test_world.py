"""The embedded world: its data sets and its gold reward."""

import json
from dataclasses import asdict

import pytest

from stages.world.gold import CONTENT_WEIGHTS, MANNER_WEIGHTS, gold_reward
from stages.world.grammar import join, parse_clause, tokens
from stages.world.reviews import (
    all_instructions,
    corpus,
    demonstrations,
    eval_prompts,
    noiseless_pairs,
    preferences,
    prompts,
    split_of,
)
from stages.world.tricks import TRICKS, UNFINISHED, best_constant, perfect_answer, score

ASK = "how is the tent? mention the zip and the price."


def _data(seed: int) -> dict[str, list]:
    return {
        "demos": demonstrations(seed, 200),
        "preferences": preferences(seed, 200, 0.1),
        "prompts": prompts(seed, 200),
        "pairs": noiseless_pairs(seed, 200),
        "eval": eval_prompts(seed, 200),
    }


@pytest.fixture(scope="module")
def evaluation() -> list[str]:
    return [row["prompt"] for row in eval_prompts(0, 300)]


def test_there_are_at_least_twenty_thousand_distinct_instructions():
    instructions = list(all_instructions())
    assert len(set(instructions)) == len(instructions) >= 20_000


def test_every_row_lies_in_the_split_of_its_instruction():
    for seed in (0, 1):
        for split, rows in _data(seed).items():
            assert {split_of(row["prompt"]) for row in rows} == {split}


def test_the_corpus_holds_no_instruction_of_another_split():
    instructions = set(all_instructions())
    questions = {text.partition("\n")[0] for text in corpus(0, 2000)} & instructions
    assert questions
    assert {split_of(question) for question in questions} == {"demos"}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others():
    assert json.dumps(_data(3)) == json.dumps(_data(3)) != json.dumps(_data(4))
    assert corpus(3, 100) == corpus(3, 100) != corpus(4, 100)


def test_a_larger_count_only_adds_rows():
    assert demonstrations(0, 60)[:50] == demonstrations(0, 50)
    assert preferences(0, 60, 0.1)[:50] == preferences(0, 50, 0.1)


def test_ids_and_prompts_are_unique():
    for rows in _data(0).values():
        assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows)


def test_more_rows_than_the_split_has_instructions_are_refused():
    with pytest.raises(ValueError, match="too few instructions"):
        eval_prompts(0, 4000)


def test_noise_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="noise must be positive"):
        preferences(0, 1, 0.0)


def test_noiseless_pairs_are_ordered_by_gold_and_noisy_ones_mostly():
    assert all(row["chosen_gold"] > row["rejected_gold"] for row in noiseless_pairs(0, 300))
    right = sum(row["chosen_gold"] > row["rejected_gold"] for row in preferences(0, 1000, 0.1)) / 1000
    assert 0.8 < right < 0.95


def test_texts_fit_the_context():
    assert max(len(tokens(text)) for text in all_instructions()) <= 18
    rows = preferences(0, 1000, 0.1)
    assert max(len(tokens(row[side])) for row in rows for side in ("chosen", "rejected")) <= 31


def test_join_is_the_inverse_of_tokens():
    text = "how is the tent? my tent is good. i like it."
    assert join(tokens(text)) == text


def test_adjectives_parse_only_where_they_fit():
    assert parse_clause(("the", "zip", "is", "very", "sturdy")).specific
    assert parse_clause(("it", "has", "a", "fair", "price")).aspect == "price"
    assert parse_clause(("the", "price", "is", "sturdy")) is None
    assert parse_clause(("the", "zip", "great")) is None
    assert parse_clause(()) is None


def test_weights_add_up_to_one():
    assert sum(CONTENT_WEIGHTS.values()) == pytest.approx(1)
    assert sum(MANNER_WEIGHTS.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("response", "finished", "terms"),
    [
        (  # all of it: opinions of 1, 0.9, 0.9 and 1
            "i love this tent. the zip is sturdy and the price is fair. i recommend it.",
            True,
            {"on_topic": 1, "aspects": 1, "focus": 1, "positive": 3.8 / 4, "grammatical": 1, "ends": 1, "brevity": 1, "no_repeat": 1},
        ),
        (  # one aspect of two, generic, and one that nobody asked for; opinions of 0.6, 0, 0.6 and 0
            "i like this tent but i sent it back. the zip is good. the strap is bad.",
            True,
            {"on_topic": 1, "aspects": 0.4, "focus": 0.5, "positive": 1.2 / 4, "grammatical": 1, "no_repeat": 1},
        ),
        (  # another product: what is said of the zip counts half, and good cheer (1, 0.9, 1) 0.3 of it
            "i love this lamp. the zip is sturdy. i would buy it again.",
            True,
            {"on_topic": 0, "aspects": 0.25, "positive": 0.3 * 2.9 / 3, "focus": 1},
        ),
        (  # cut off: the second sentence (3 of 8 words) is no sentence
            "the tent feels really great. the zip is",
            False,
            {"on_topic": 1, "aspects": 0, "positive": 1, "grammatical": 5 / 8, "ends": 0, "brevity": 4 / 7, "no_repeat": 8 / 11},
        ),
        (  # "great" and "is great" again and again: great three times is two repeats
            "the tent is great. the zip is great. the price is great.",
            True,
            {"aspects": 0.8, "positive": 1, "no_repeat": 0.4, "ends": 1, "brevity": 1},
        ),
        (  # "and" between praise and blame: half a sentence, so half an end
            "i love the tent and the zip is loose.",
            True,
            {"grammatical": 0.5, "ends": 0.5, "aspects": 0.5},
        ),
    ],
)
def test_terms_come_out_as_computed_by_hand(response, finished, terms):
    gold = asdict(gold_reward(ASK, response, finished=finished))
    assert {name: gold[name] for name in terms} == pytest.approx(terms)


def test_the_total_is_content_times_manner():
    gold = asdict(gold_reward(ASK, "i love this tent. the zip is sturdy and the price is fair. i recommend it.", finished=True))
    content = 0.10 + 0.35 + 0.10 + 0.45 * 3.8 / 4
    assert gold["total"] == pytest.approx(content)


def test_every_term_lies_between_zero_and_one():
    texts = ["", ".", "zip " * 50, "... ? : ü", *(row["response"] for row in demonstrations(0, 500))]
    for text in texts:
        for finished in (True, False):
            assert all(0 <= value <= 1 for value in asdict(gold_reward(ASK, text, finished=finished)).values())
    assert gold_reward("say hello.", "hello.", finished=True).total == 0


def test_a_perfect_answer_scores_at_least_095(evaluation):
    assert min(gold_reward(prompt, perfect_answer(prompt), finished=True).total for prompt in evaluation) >= 0.95


def test_demonstrations_are_half_good_and_spread_broadly():
    totals = [gold_reward(row["prompt"], row["response"], finished=True).total for row in demonstrations(0, 1000)]
    assert 0.42 < sum(totals) / len(totals) < 0.56
    assert sum(total < 0.3 for total in totals) > 150 < sum(total > 0.7 for total in totals)


@pytest.mark.parametrize("name", TRICKS)
def test_a_cheap_trick_stays_below_056(name, evaluation):
    assert score(TRICKS[name], evaluation, finished=name not in UNFINISHED) < 0.56


def test_tricks_that_do_not_read_the_instruction_stay_below_03(evaluation):
    assert best_constant(evaluation, tries=500)[1] < 0.3
