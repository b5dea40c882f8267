"""The gold reward: what the human of the embedded world likes in a review.

It reads the instruction only for its topic and the aspects asked for, and the response through the grammar. Weights
and tricks that were tried against it are in data/README.md.
"""

from dataclasses import dataclass
from functools import lru_cache

from stages.world.grammar import CONTENT_WORDS, KIND, OWN_ASPECTS, parse_sentence, tokens

CONTENT_WEIGHTS: dict[str, float] = {"on_topic": 0.10, "aspects": 0.35, "focus": 0.10, "positive": 0.45}
"""What a review says: the weight of each term in the content; they add up to 1."""

MANNER_WEIGHTS: dict[str, float] = {"grammatical": 0.3, "ends": 0.2, "brevity": 0.2, "no_repeat": 0.3}
"""How it says it: the weight of each term in the manner, which multiplies the content; they add up to 1."""

SHORTEST, SHORT, LONG, LONGEST = 4, 11, 20, 30
"""`brevity` in words: 0 up to SHORTEST, 1 from SHORT to LONG, 0 from LONGEST on, straight lines between."""

GENERIC_CREDIT, PLAIN_CREDIT = 0.8, 0.4
"""What `aspects` gives for a clause with a word of praise or blame that fits anything, and for one with no opinion."""

OFF_TOPIC = 0.3
"""What good cheer is worth about another product than the one asked for."""

REPEAT_COST = 0.3
"""What each repeated content word takes from `no_repeat`."""


@dataclass(frozen=True, slots=True)
class Gold:
    """The gold reward of one response: each term and the total in [0, 1]."""

    total: float
    """Content times manner: (sum of CONTENT_WEIGHTS * term) * (sum of MANNER_WEIGHTS * term)."""
    on_topic: float
    """1: a grammatical clause names the product asked for. Halved when another product is named too."""
    aspects: float
    """Mean over the asked aspects: 1 where a grammatical clause says something specific of it, 0.8 something generic,
    0.4 something without opinion, 0 where none speaks of it. Halved when another product is named."""
    focus: float
    """Of all aspects spoken of, the share that was asked for; 0 when none is spoken of."""
    positive: float
    """Mean valence of all opinions, 0 without any; only OFF_TOPIC of it where the product asked for is not named."""
    grammatical: float
    """The share of words in well-formed sentences; see grammar.parse_sentence."""
    ends: float
    """1: ends by itself, with a full stop after a well-formed sentence. 0.5: with a full stop after something else."""
    brevity: float
    """1 between SHORT and LONG words, falling to 0 at SHORTEST and LONGEST."""
    no_repeat: float
    """1 less REPEAT_COST for each content word said before; scaled down below SHORT words."""


@lru_cache(maxsize=1 << 16)
def asked(instruction: str) -> tuple[str | None, tuple[str, ...]]:
    """The topic and the aspects that an instruction asks for, in the order of asking."""
    words = tokens(instruction)
    topic = next((word for word in words if word in OWN_ASPECTS), None)
    return topic, tuple(dict.fromkeys(word for word in words if word in KIND))


def _brevity(words: int) -> float:
    return max(0.0, min(1.0, (words - SHORTEST) / (SHORT - SHORTEST), (LONGEST - words) / (LONGEST - LONG)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def gold_reward(instruction: str, response: str, *, finished: bool) -> Gold:
    """The gold reward of a response.

    instruction, response: plain text, without the chat template and special tokens. finished: whether the response
    ended by itself (its end-of-sequence token came before the token limit). Never raises: a text of unknown words is
    an ungrammatical one, and an instruction without a topic or aspects has none that a response could meet.
    """
    topic, aspects = asked(instruction)
    words = tokens(response)
    clauses, formed, sentence, last = [], 0.0, [], 0.0
    for word in words:
        if word != ".":
            sentence.append(word)
            continue
        said, last = parse_sentence(tuple(sentence)) if sentence else ((), 0.0)
        clauses.extend(said)
        formed += last * len(sentence)
        sentence = []
    clauses.extend(parse_sentence(tuple(sentence))[0] if sentence else ())
    count = sum(word != "." for word in words)

    named = {clause.topic for clause in clauses if clause.topic}
    astray = 0.5 if named - {topic} else 1.0
    on_topic = astray if topic in named else 0.0

    credit = dict.fromkeys(aspects, 0.0)
    spoken = set()
    for clause in clauses:
        if clause.aspect is None:
            continue
        spoken.add(clause.aspect)
        if clause.aspect in credit:
            opinion = 1.0 if clause.specific else PLAIN_CREDIT if clause.valence == 0.3 else GENERIC_CREDIT
            credit[clause.aspect] = max(credit[clause.aspect], opinion)
    opinions = [clause.valence for clause in clauses if clause.valence is not None]

    content = [word for word in words if word in CONTENT_WORDS and word != topic]
    repeats = len(content) - len(set(content)) + max(0, words.count(topic) - 2)
    terms = {
        "on_topic": on_topic,
        "aspects": astray * _mean(list(credit.values())),
        "focus": len(spoken & credit.keys()) / len(spoken) if spoken else 0.0,
        "positive": _mean(opinions) * (1.0 if topic in named else OFF_TOPIC),
        "grammatical": formed / count if count else 0.0,
        "ends": (1.0 if last == 1.0 else 0.5) if finished and words and words[-1] == "." else 0.0,
        "brevity": _brevity(count),
        "no_repeat": max(0.0, 1.0 - REPEAT_COST * repeats) * min(1.0, count / SHORT),
    }
    content_score = sum(weight * terms[name] for name, weight in CONTENT_WEIGHTS.items())
    manner_score = sum(weight * terms[name] for name, weight in MANNER_WEIGHTS.items())
    return Gold(total=content_score * manner_score, **terms)
