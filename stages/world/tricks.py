"""Cheap tricks against the gold reward, and what they score: `python -m stages.world.tricks` prints the table.

A trick answers without understanding: always the same text, or the instruction's words put into a fixed frame.
"""

from collections.abc import Callable
from random import Random
from statistics import mean

from stages.world.gold import asked, gold_reward
from stages.world.grammar import ASPECTS, GENERIC, KIND, SHARED_ASPECTS, SPECIFIC, TOPICS
from stages.world.reviews import PERFECT, demonstrations, draw_instruction, eval_prompts, write_review

Trick = Callable[[str], str]


def _always(response: str) -> Trick:
    return lambda instruction: response


def _topic(instruction: str) -> str:
    return asked(instruction)[0] or "product"


def _bare_words(instruction: str) -> str:
    topic, aspects = asked(instruction)
    return " ".join([topic or "", *aspects]) + "."


def _list_all_aspects(instruction: str) -> str:
    topic = _topic(instruction)
    return f"i love this {topic}. " + " ".join(f"i love the {aspect}." for aspect in ASPECTS[topic])


def _cheerful_topic_only(instruction: str) -> str:
    return f"i love this {_topic(instruction)}. it is really great and i recommend it. i would buy it again."


def _wrong_aspects(instruction: str) -> str:
    topic, aspects = asked(instruction)
    first, second = [other for other in SHARED_ASPECTS if other not in aspects][:2]
    return f"i love this {topic}. the {first} is fair and the {second} is very pleasing. i would buy it again."


def _cross_but_attentive(instruction: str) -> str:
    topic, aspects = asked(instruction)
    return f"i hate this {topic}. " + " and ".join(f"the {aspect} is bad" for aspect in aspects) + ". i sent it back."


def _parrot(instruction: str) -> str:
    topic, aspects = asked(instruction)
    return " ".join([f"the {topic} is great.", *(f"the {aspect} is great." for aspect in aspects)] * 3)


def _never_stops(instruction: str) -> str:
    topic, aspects = asked(instruction)
    return f"i love this {topic} and " + " and ".join(f"the {aspect} is great" for aspect in aspects)


TRICKS: dict[str, Trick] = {
    "empty answer": _always(""),
    "a full stop": _always("."),
    "one word repeated ('great' 20 times)": _always(" ".join(["great"] * 20) + "."),
    "praise spam ('great superb lovely ...')": _always(" ".join(GENERIC["great"] * 4) + "."),
    "one sentence repeated ('it is great.' 5 times)": _always(" ".join(["it is great."] * 5)),
    "copy of the instruction": lambda instruction: instruction,
    "the asked words alone": _bare_words,
    "fixed cheerful text": _always("i love it because it is really great. it feels wonderful and i would buy it again."),
    "fixed text on the four shared aspects": _always(
        "i love the price and it has a pleasing size. the design is right and the colour is superb."
    ),
    "all ten aspects of the topic": _list_all_aspects,
    "cheerful, topic named, aspects ignored": _cheerful_topic_only,
    "cheerful, topic named, other aspects": _wrong_aspects,
    "attentive frame, no full stop, not finished": _never_stops,
    "one frame repeated for topic and aspects, three times": _parrot,
    "attentive but cross": _cross_but_attentive,
}
"""The tricks by what they do. The last six read the topic of the instruction, the last three also its aspects."""

UNFINISHED = {"attentive frame, no full stop, not finished"}


def score(answer: Trick, prompts: list[str], *, finished: bool = True) -> float:
    """The mean gold reward of the answers to the prompts."""
    return mean(gold_reward(prompt, answer(prompt), finished=finished).total for prompt in prompts)


def best_constant(prompts: list[str], *, seed: int = 0, tries: int = 2000) -> tuple[str, float]:
    """The best of many constant answers: perfect reviews of every topic, most of them of the aspects asked most often.

    Screens on the first 60 prompts and gives the mean over all of them for the best.
    """
    rng = Random(f"constant/{seed}")
    candidates = []
    for place in range(tries):
        topic = TOPICS[place % len(TOPICS)]
        pool = SHARED_ASPECTS if rng.random() < 0.6 else ASPECTS[topic]
        candidates.append(write_review(rng, topic, tuple(rng.sample(pool, rng.randint(1, 4))), PERFECT))
    ranked = sorted(candidates, key=lambda text: -score(_always(text), prompts[:60]))
    return max(((text, score(_always(text), prompts)) for text in ranked[:40]), key=lambda pair: pair[1])


def perfect_answer(instruction: str) -> str:
    """A short, praising, specific review of what was asked."""
    topic, aspects = asked(instruction)
    clauses = [f"the {aspect} is {SPECIFIC[KIND[aspect]]['good'][place]}" for place, aspect in enumerate(aspects)]
    return f"i love this {topic}. " + " and ".join(clauses) + ". i would buy it again."


def table(count: int = 500) -> list[tuple[str, float]]:
    """Every trick and its mean gold reward over evaluation prompts, then the references that it is measured against."""
    prompts = [row["prompt"] for row in eval_prompts(0, count)]
    rows = [(name, score(trick, prompts, finished=name not in UNFINISHED)) for name, trick in TRICKS.items()]
    constant, value = best_constant(prompts)
    rows.append((f"best of 2,000 constant texts ('{constant}')", value))
    demos = demonstrations(0, 2000)
    rows.append(("(demonstrations)", mean(gold_reward(row["prompt"], row["response"], finished=True).total for row in demos)))
    rng = Random("tricks")
    asked_for = [draw_instruction(rng) for _ in range(count)]
    written = [(one, write_review(rng, one.topic, one.aspects, PERFECT)) for one in asked_for]
    rows.append(("(PERFECT writer)", mean(gold_reward(one.text, review, finished=True).total for one, review in written)))
    rows.append(("(perfect answer)", score(perfect_answer, prompts)))
    return rows


def main() -> None:
    """Print the table as Markdown."""
    print("| answer | mean gold |\n|---|---|")
    for name, value in table():
        print(f"| {name} | {value:.3f} |")


if __name__ == "__main__":
    main()
