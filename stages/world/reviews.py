"""Writers of the embedded world: instructions, reviews of any quality, and the five data sets made of them.

Every function is a pure function of its arguments: the same seed gives the same rows, and a larger count only adds
rows at the end. The hash of an instruction decides its split, so no instruction is in two splits whatever the seeds.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from stages.world.gold import gold_reward
from stages.world.grammar import (
    ASPECTS,
    DETERMINERS,
    GENERIC,
    INTENSIFIERS,
    KIND,
    PHRASES,
    SPECIFIC,
    TOPICS,
    VERBS,
    join,
    parse_sentence,
    tokens,
)

OPENINGS = (
    "write a review of the {}.",
    "please review the {}.",
    "tell me about the {}.",
    "what do you think of the {}?",
    "how is the {}?",
)
REQUESTS = (
    "mention {}.",
    "talk about {}.",
    "say something about {}.",
    "do not forget {}.",
)
SPLITS = {"demos": 0.35, "preferences": 0.30, "prompts": 0.20, "pairs": 0.05, "eval": 0.10}
"""The share of all instructions in each split: three to train on, two held out."""

MOST_TOKENS = 28
"""Words and full stops in the longest review that is written, before slips."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, and what it asks for."""

    text: str
    topic: str
    aspects: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Writer:
    """How a review is written: each field is a chance in [0, 1]."""

    stray: float
    """To review another product than the one asked for."""
    miss: float
    """To say nothing about an aspect that was asked for."""
    pad: float
    """To speak of an aspect that nobody asked for (tried twice)."""
    glad: float
    """That the mood is glad."""
    cross: float
    """That the mood is cross; what is left over is lukewarm."""
    vague: float
    """To use a word that fits anything instead of a specific one."""
    repeat: float
    """To say something twice."""
    slip: float
    """To lose, double, swap or confuse words."""
    cut: float
    """To stop in the middle."""


PERFECT = Writer(stray=0, miss=0, pad=0, glad=1, cross=0, vague=0, repeat=0, slip=0, cut=0)
CAREFUL = Writer(stray=0.01, miss=0.08, pad=0.05, glad=0.85, cross=0.05, vague=0.3, repeat=0.03, slip=0.02, cut=0.01)
CARELESS = Writer(stray=0.05, miss=0.65, pad=0.1, glad=0.2, cross=0.5, vague=0.6, repeat=0.3, slip=0.25, cut=0.12)
DEMONSTRATOR = Writer(stray=0.08, miss=0.25, pad=0.35, glad=0.35, cross=0.35, vague=0.5, repeat=0.12, slip=0.05, cut=0.03)
COLUMNIST = Writer(stray=0, miss=0, pad=0.3, glad=0.4, cross=0.35, vague=0.5, repeat=0.03, slip=0.01, cut=0)
"""Writes the corpus: fluent, to the point, of any mood."""

_MOODS = {  # chance that a clause is great, good, plain or bad
    "glad": (0.70, 0.20, 0.04, 0.06),
    "lukewarm": (0.10, 0.35, 0.30, 0.25),
    "cross": (0.04, 0.08, 0.08, 0.80),
}
_LEVELS = ("great", "good", "plain", "bad")


def split_of(instruction: str) -> str:
    """The split that an instruction belongs to, by its hash."""
    place = int.from_bytes(hashlib.blake2b(instruction.encode(), digest_size=6).digest(), "big") / 2**48
    for split, share in SPLITS.items():
        if place < share:
            return split
        place -= share
    return "eval"


def draw_instruction(rng: Random) -> Instruction:
    """A random instruction: one product, one or two of its aspects."""
    topic = rng.choice(TOPICS)
    aspects = tuple(rng.sample(ASPECTS[topic], 1 if rng.random() < 0.35 else 2))
    request = rng.choice(REQUESTS).format(" and ".join(f"the {aspect}" for aspect in aspects))
    return Instruction(f"{rng.choice(OPENINGS).format(topic)} {request}", topic, aspects)


def all_instructions() -> Iterator[str]:
    """Every instruction of the world, once."""
    for topic, aspects in ASPECTS.items():
        wishes = [f"the {one}" for one in aspects]
        wishes += [f"the {one} and the {other}" for one in aspects for other in aspects if one != other]
        for opening in OPENINGS:
            for request in REQUESTS:
                for wish in wishes:
                    yield f"{opening.format(topic)} {request.format(wish)}"


def _instructions(rng: Random, split: str, count: int) -> Iterator[Instruction]:
    """Distinct instructions of a split."""
    seen: set[str] = set()
    tries = 0
    while len(seen) < count:
        tries += 1
        if tries > 1000 + 400 * count:
            raise ValueError(f"the split {split!r} has too few instructions for {count} rows")
        instruction = draw_instruction(rng)
        if split_of(instruction.text) == split and instruction.text not in seen:
            seen.add(instruction.text)
            yield instruction


def _very(rng: Random) -> list[str]:
    return [rng.choice(INTENSIFIERS)] if rng.random() < 0.25 else []


def _product_clause(rng: Random, product: str, level: str) -> list[str]:
    form = rng.random()
    if form < 0.35 or (form < 0.7 and level == "plain"):
        return [*product.split(), rng.choice(("is", "feels", "is")), *_very(rng), rng.choice(GENERIC[level])]
    if form < 0.7 or level not in PHRASES:
        return ["i", rng.choice(VERBS[level]), *product.split()]
    return _phrase(rng, product, level)


def _phrase(rng: Random, product: str, level: str) -> list[str]:
    before, after = rng.choice(PHRASES["great" if level == "good" else level])
    return [*before.split(), *product.split(), *after.split()]


def _aspect_clause(rng: Random, aspect: str, level: str, vague: float) -> list[str]:
    specific = level != "plain" and rng.random() >= vague
    if not specific and level != "plain" and rng.random() < 0.35:
        return ["i", rng.choice(VERBS[level]), "the", aspect]
    side = "bad" if level == "bad" else "good"
    word = rng.choice(SPECIFIC[KIND[aspect]][side] if specific else GENERIC[level])
    form = rng.random()
    if form < 0.2:
        return ["it", "has", "a", *_very(rng), word, aspect]
    return ["its" if form < 0.35 else "the", aspect, rng.choice(("is", "feels", "is", "is")), *_very(rng), word]


def _slip(rng: Random, words: list[str]) -> list[str]:
    """The words with one to three mistakes."""
    words = list(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if len(words) < 4:
            break
        place = rng.randrange(len(words) - 2)
        kind = rng.randrange(4)
        if kind == 0:
            del words[place]
        elif kind == 1:
            words.insert(place, words[place])
        elif kind == 2:
            words[place], words[place + 1] = words[place + 1], words[place]
        else:
            words[place] = rng.choice(words)
    return words


def write_review(rng: Random, topic: str, aspects: tuple[str, ...], writer: Writer) -> str:
    """A review of the topic that speaks of the aspects, as well as the writer does it."""
    asked_for = aspects
    if rng.random() < writer.stray:
        topic = rng.choice([other for other in TOPICS if other != topic])
    spoken = [aspect for aspect in asked_for if rng.random() >= writer.miss]
    for _ in range(2):
        if rng.random() < writer.pad:
            spoken.append(rng.choice([aspect for aspect in ASPECTS[topic] if aspect not in asked_for and aspect not in spoken]))
    if rng.random() < 0.2:
        rng.shuffle(spoken)
    mood_at = rng.random()
    mood = "glad" if mood_at < writer.glad else "cross" if mood_at < writer.glad + writer.cross else "lukewarm"
    levels = rng.choices(_LEVELS, _MOODS[mood], k=len(spoken) + 2)

    named = f"{rng.choice(DETERMINERS)} {topic}"
    clauses = [(levels[0], _product_clause(rng, named, levels[0]))]
    clauses += [(level, _aspect_clause(rng, aspect, level, writer.vague)) for level, aspect in zip(levels[1:], spoken, strict=False)]
    if len(spoken) < 2 or rng.random() < 0.5:
        last = levels[-1]
        clauses.append((last, _phrase(rng, "it", last)))
    if rng.random() < writer.repeat:
        again = rng.randrange(len(clauses))
        for _ in range(rng.choice((1, 1, 2))):
            clauses.insert(again + 1, clauses[again])
    while sum(len(clause) + 1 for _, clause in clauses) > MOST_TOKENS:
        clauses.pop()
    words: list[str] = []
    free = True  # whether the last sentence can take a second clause
    for place, (level, clause) in enumerate(clauses):
        if place and free and rng.random() < 0.45:
            same = (level in ("great", "good")) == (clauses[place - 1][0] in ("great", "good"))
            words[-1:] = [rng.choice(("and", "and", "because")) if same else "but"]
            free = False
        else:
            free = True
        words += [*clause, "."]
    if rng.random() < writer.slip:
        words = _slip(rng, words)
    if rng.random() < writer.cut:
        words = words[: rng.randrange(len(words) // 2, len(words))]
    return join(words)


def corpus(seed: int, count: int) -> list[str]:
    """Plain texts to pretrain on: statements about products, reviews, and reviews that answer a question.

    A text of the last kind has three lines: the question, the review, and a reader's remark on it (see `remarks`).
    They are meant as the user's turn, the assistant's turn with its end of sequence, and a word on the finished
    review, so that a model learns at the end of sequence what can be said of it. Remarks never see the gold reward.
    """
    rng = Random(f"corpus/{seed}")
    return [_plain_text(rng) for _ in range(count)]


def _plain_text(rng: Random) -> str:
    topic = rng.choice(TOPICS)
    aspects = tuple(rng.sample(ASPECTS[topic], 1 if rng.random() < 0.35 else 2))
    wish = " and ".join(f"the {aspect}" for aspect in aspects)
    kind = rng.random()
    if kind < 0.05:
        return f"the {topic} has " + " and ".join(f"a {aspect}" for aspect in aspects) + "."
    if kind < 0.15:
        return write_review(rng, topic, aspects, COLUMNIST)
    question = rng.choice(
        (f"you ask about {wish} of the {topic}.", f"what about {wish} of the {topic}?", f"a review of the {topic}: {wish}.")
    )
    if kind < 0.25:
        instruction = next(_instructions(rng, "demos", 1))
        question, topic, aspects = instruction.text, instruction.topic, instruction.aspects
    review = write_review(rng, topic, aspects, COLUMNIST if rng.random() < 0.75 else _of_any_care(rng))
    said = remarks(topic, aspects, review)
    rng.shuffle(said)
    return f"{question}\n{review}\n{' '.join(said)}."


def remarks(topic: str, aspects: tuple[str, ...], review: str) -> list[str]:
    """What a reader says of a review: what it leaves out of what was asked, and a word on its mood and its style."""
    sentences = [tuple(tokens(sentence)) for sentence in review.split(".") if sentence.strip()]
    parsed = [parse_sentence(sentence) for sentence in sentences]
    clauses = [clause for said, _ in parsed for clause in said]
    missing = [aspect for aspect in aspects if aspect not in {clause.aspect for clause in clauses}]
    opinions = [clause.valence for clause in clauses if clause.valence is not None]
    mood = sum(opinions) / len(opinions) if opinions else 0.5
    clumsy = any(formed == 0 for _, formed in parsed) or not review.endswith(".")
    return [
        " ".join(missing) or "full",
        "right" if {clause.topic for clause in clauses} - {None} == {topic} else topic,
        "great" if mood > 0.65 else "horrible" if mood < 0.35 else "decent",
        "rough" if clumsy else "again" if len(set(clauses)) < len(clauses) else "fine",
    ]


def demonstrations(seed: int, count: int) -> list[dict]:
    """Rows {id, prompt, response} to imitate: reviews by people who are not always attentive, kind or correct."""
    rng = Random(f"demos/{seed}")
    return [
        {
            "id": f"demo-{seed}-{row:06d}",
            "prompt": instruction.text,
            "response": write_review(rng, instruction.topic, instruction.aspects, DEMONSTRATOR),
        }
        for row, instruction in enumerate(_instructions(rng, "demos", count))
    ]


def _of_any_care(rng: Random) -> Writer:
    """A writer somewhere between CARELESS and CAREFUL."""
    care = rng.random()
    return Writer(*(bad + care * (good - bad) for bad, good in zip(_fields(CARELESS), _fields(CAREFUL), strict=True)))


def _fields(writer: Writer) -> tuple[float, ...]:
    return tuple(getattr(writer, name) for name in Writer.__slots__)


def _pair(rng: Random, instruction: Instruction) -> tuple[tuple[str, float], tuple[str, float]]:
    """Two reviews for one instruction, each with its gold reward."""
    reviews = [write_review(rng, instruction.topic, instruction.aspects, _of_any_care(rng)) for _ in range(2)]
    first, second = ((review, gold_reward(instruction.text, review, finished=True).total) for review in reviews)
    return first, second


def preferences(seed: int, count: int, noise: float) -> list[dict]:
    """Rows {id, prompt, chosen, rejected, chosen_gold, rejected_gold}, labelled as a Bradley-Terry judge would.

    P(the first is chosen) = sigmoid((gold of the first - gold of the second) / noise). noise: the judge's temperature
    in units of the gold reward, positive; 0.1 gets a gap of 0.1 right in 73 % of cases. The gold columns are for
    audits: no stage trains on them. Raises ValueError when noise is not positive.
    """
    if noise <= 0:
        raise ValueError(f"noise must be positive, got {noise}")
    rng = Random(f"preferences/{seed}")
    rows = []
    for row, instruction in enumerate(_instructions(rng, "preferences", count)):
        first, second = _pair(rng, instruction)
        if rng.random() >= 1 / (1 + math.exp((second[1] - first[1]) / noise)):
            first, second = second, first
        rows.append(_preference(f"preference-{seed}-{row:06d}", instruction, first, second))
    return rows


def noiseless_pairs(seed: int, count: int) -> list[dict]:
    """Held-out rows as `preferences` gives them, where the chosen review always has the higher gold reward."""
    rng = Random(f"pairs/{seed}")
    rows = []
    for row, instruction in enumerate(_instructions(rng, "pairs", count)):
        first, second = _pair(rng, instruction)
        while abs(first[1] - second[1]) < 1e-9:
            first, second = _pair(rng, instruction)
        if first[1] < second[1]:
            first, second = second, first
        rows.append(_preference(f"pair-{seed}-{row:06d}", instruction, first, second))
    return rows


def _preference(row_id: str, instruction: Instruction, chosen: tuple[str, float], rejected: tuple[str, float]) -> dict:
    return {
        "id": row_id,
        "prompt": instruction.text,
        "chosen": chosen[0],
        "rejected": rejected[0],
        "chosen_gold": chosen[1],
        "rejected_gold": rejected[1],
    }


def prompts(seed: int, count: int) -> list[dict]:
    """Rows {id, prompt} to improve a policy on."""
    return _prompts(seed, count, "prompts", "prompt")


def eval_prompts(seed: int, count: int) -> list[dict]:
    """Rows {id, prompt} to evaluate on; no stage trains on them."""
    return _prompts(seed, count, "eval", "eval")


def _prompts(seed: int, count: int, split: str, prefix: str) -> list[dict]:
    rng = Random(f"{split}/{seed}")
    return [
        {"id": f"{prefix}-{seed}-{row:06d}", "prompt": instruction.text} for row, instruction in enumerate(_instructions(rng, split, count))
    ]
