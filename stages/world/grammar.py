"""The language of the embedded world: its words, its clauses, and their parser.

    review   = sentence+
    sentence = clause (connective clause)* "."          connective = and | but | because
    clause   = product "is" [very] generic              the tent is very good
             | ("the" | "its") aspect "is" [very] adj   the zip is sturdy
             | product "has a" [very] adj aspect        it has a sturdy zip
             | "i" verb (product | "the" aspect)        i love the zip
             | a phrase about the product               i would buy it again
    product  = ("the" | "this" | "my") topic | "it"

An adjective is generic ("good", of anything) or specific ("sturdy"), and a specific one fits aspects of one kind only:
a zip is sturdy, a price is fair, and "the price is sturdy" does not parse. Everything is lower case; a text is its
words with single spaces, and a full stop or question mark sticks to the word before it.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

SHARED_ASPECTS = ("price", "size", "design", "colour")
"""Aspects of every topic."""

OWN_ASPECTS: dict[str, tuple[str, ...]] = {
    "tent": ("zip", "fabric", "frame", "floor", "pocket", "door"),
    "lamp": ("switch", "cable", "light", "stand", "button", "timer"),
    "phone": ("screen", "battery", "speaker", "button", "camera", "alarm"),
    "kettle": ("lid", "handle", "switch", "cable", "spout", "base"),
    "jacket": ("zip", "fabric", "hood", "pocket", "collar", "lining"),
    "bike": ("frame", "saddle", "brake", "bell", "chain", "light"),
    "chair": ("seat", "frame", "fabric", "wheel", "cushion", "handle"),
    "rucksack": ("zip", "strap", "pocket", "fabric", "buckle", "lining"),
    "watch": ("screen", "battery", "strap", "buckle", "alarm", "light"),
    "radio": ("speaker", "battery", "sound", "button", "screen", "timer"),
    "drill": ("motor", "battery", "handle", "button", "cable", "light"),
    "oven": ("door", "tray", "timer", "light", "button", "handle"),
    "guitar": ("sound", "strap", "string", "neck", "bridge", "stand"),
    "grill": ("lid", "handle", "tray", "wheel", "stand", "timer"),
    "mixer": ("motor", "bowl", "lid", "button", "cable", "timer"),
    "pram": ("wheel", "brake", "hood", "strap", "seat", "frame"),
}
TOPICS = tuple(OWN_ASPECTS)
ASPECTS: dict[str, tuple[str, ...]] = {topic: own + SHARED_ASPECTS for topic, own in OWN_ASPECTS.items()}
"""The ten aspects of each topic."""

_SOFT = ("fabric", "pocket", "hood", "collar", "lining", "saddle", "seat", "cushion")
_WORKING = ("light", "timer", "screen", "battery", "speaker", "button", "camera", "alarm", "sound", "motor")


def _kind(aspect: str) -> str:
    if aspect in SHARED_ASPECTS:
        return "choice"
    return "soft" if aspect in _SOFT else "working" if aspect in _WORKING else "firm"


KIND: dict[str, str] = {aspect: _kind(aspect) for aspects in ASPECTS.values() for aspect in aspects}
"""The kind of each aspect: firm, soft, working or choice."""

SPECIFIC: dict[str, dict[str, tuple[str, ...]]] = {
    "firm": {"good": ("sturdy", "solid", "tough"), "bad": ("flimsy", "loose", "weak")},
    "soft": {"good": ("soft", "warm", "cosy"), "bad": ("rough", "thin", "scratchy")},
    "working": {"good": ("reliable", "precise", "strong"), "bad": ("faulty", "jumpy", "slow")},
    "choice": {"good": ("fair", "right", "pleasing"), "bad": ("wrong", "silly", "strange")},
}
"""Adjectives that fit the aspects of one kind only."""

GENERIC: dict[str, tuple[str, ...]] = {
    "great": ("great", "superb", "lovely", "brilliant", "wonderful"),
    "good": ("good", "nice", "fine", "decent"),
    "plain": ("plain", "normal", "usual"),
    "bad": ("bad", "poor", "horrible", "terrible", "dreadful"),
}
"""Adjectives that fit anything, by how much they praise."""

VERBS: dict[str, tuple[str, ...]] = {"great": ("love", "enjoy"), "good": ("like",), "bad": ("hate", "dislike")}

PHRASES: dict[str, tuple[tuple[str, str], ...]] = {
    "great": (("i would buy", "again"), ("i recommend", "")),
    "plain": (("i use", "every day"), ("i bought", "last week"), ("", "was a gift")),
    "bad": (("i would not buy", "again"), ("i sent", "back"), ("", "broke after a week")),
}
"""Whole clauses about the product, as the words before it and the words after it. The plain ones hold no opinion."""

VALENCE = {"great": 1.0, "good": 0.6, "plain": 0.3, "bad": 0.0}
SPECIFIC_VALENCE = {"good": 0.9, "bad": 0.0}
DETERMINERS = ("the", "this", "my")
INTENSIFIERS = ("very", "really", "quite")
CONNECTIVES = ("and", "but", "because")


@dataclass(frozen=True, slots=True)
class Clause:
    """What one grammatical clause says."""

    topic: str | None
    """The product that it names; None for "it" and for clauses that name an aspect only."""
    aspect: str | None
    """The aspect that it speaks of; None where it speaks of the product."""
    valence: float | None
    """How good it says that is, from 0 (bad) to 1 (great); None where it holds no opinion."""
    specific: bool = False
    """Whether its adjective fits this kind of aspect only."""


_GENERIC_VALENCE = {word: VALENCE[level] for level, words in GENERIC.items() for word in words}
_VERB_VALENCE = {word: VALENCE[level] for level, words in VERBS.items() for word in words}
_SPECIFIC_VALENCE = {
    (kind, word): SPECIFIC_VALENCE[side] for kind, sides in SPECIFIC.items() for side, words in sides.items() for word in words
}
_PHRASE_VALENCE = {
    (tuple(before.split()), tuple(after.split())): None if level == "plain" else VALENCE[level]
    for level, phrases in PHRASES.items()
    for before, after in phrases
}
CONTENT_WORDS = frozenset(
    {*TOPICS, *KIND, *_GENERIC_VALENCE, *_VERB_VALENCE, *(word for _, word in _SPECIFIC_VALENCE), *INTENSIFIERS}
    | {"again", "recommend", "back", "broke", "day", "week", "gift"}
)
"""Words that a good review says once. A topic may be named again: it is left to `no_repeat` to allow that."""


def adjective(word: str, aspect: str | None) -> tuple[float, bool] | None:
    """The valence of an adjective and whether it is specific; None where it is none, or does not fit the aspect."""
    if word in _GENERIC_VALENCE:
        return _GENERIC_VALENCE[word], False
    valence = _SPECIFIC_VALENCE.get((KIND[aspect], word)) if aspect else None
    return None if valence is None else (valence, True)


def _product(words: tuple[str, ...]) -> tuple[bool, str | None]:
    """Whether the words are a noun phrase for the product, and the topic that it names."""
    if words == ("it",):
        return True, None
    if len(words) == 2 and words[0] in DETERMINERS and words[1] in OWN_ASPECTS:
        return True, words[1]
    return False, None


def _aspect(words: tuple[str, ...]) -> str | None:
    """The aspect that the words are a noun phrase for."""
    return words[1] if len(words) == 2 and words[0] in ("the", "its") and words[1] in KIND else None


def _without_intensifier(words: tuple[str, ...]) -> tuple[str, ...]:
    return words[1:] if words and words[0] in INTENSIFIERS else words


@lru_cache(maxsize=1 << 16)
def parse_clause(words: tuple[str, ...]) -> Clause | None:
    """The clause that the words make, or None where they make none."""
    for (before, after), valence in _PHRASE_VALENCE.items():
        end = len(words) - len(after)
        if words[: len(before)] == before and words[end:] == after and end > len(before):
            is_product, topic = _product(words[len(before) : end])
            if is_product:
                return Clause(topic, None, valence)
    if len(words) >= 3 and words[0] == "i" and words[1] in _VERB_VALENCE:
        is_product, topic = _product(words[2:])
        aspect = _aspect(words[2:])
        return Clause(topic, aspect, _VERB_VALENCE[words[1]]) if is_product or aspect else None
    verb = 1 if words and words[0] == "it" else 2
    if len(words) <= verb:
        return None
    is_product, topic = _product(words[:verb])
    aspect, predicate = _aspect(words[:verb]), words[verb + 1 :]
    if words[verb] == "has" and is_product and predicate[:1] == ("a",):
        predicate = _without_intensifier(predicate[1:])
        aspect = predicate[1] if len(predicate) == 2 and predicate[1] in KIND else None
        said = adjective(predicate[0], aspect) if aspect else None
        return Clause(topic, aspect, *said) if said else None
    predicate = _without_intensifier(predicate)
    if words[verb] in ("is", "feels") and (is_product or aspect) and len(predicate) == 1:
        said = adjective(predicate[0], aspect)
        return Clause(topic, aspect, *said) if said else None
    return None


_TOKEN = re.compile(r"[^\s.?!,:;]+|[.?!,:;]")


def tokens(text: str) -> list[str]:
    """The words and punctuation marks of a text."""
    return _TOKEN.findall(text)


def join(words: list[str]) -> str:
    """The text of words and punctuation marks; the inverse of `tokens`."""
    return " ".join(words).replace(" .", ".").replace(" ?", "?").replace(" :", ":")


@lru_cache(maxsize=1 << 16)
def parse_sentence(words: tuple[str, ...]) -> tuple[tuple[Clause, ...], float]:
    """The grammatical clauses of a sentence without its full stop, and how well it is formed: 1, 0.5 or 0.

    1: all parts between connectives are clauses, at most three of them. 0.5: the same, but a connective contradicts
    what it joins: "and" and "because" join opinions of one side, "but" of two. 0: a part is no clause; clauses found
    beside it are still returned.
    """
    parts: list[list[str]] = [[]]
    joints = []
    for word in words:
        if word in CONNECTIVES:
            joints.append(word)
            parts.append([])
        else:
            parts[-1].append(word)
    parsed = [parse_clause(tuple(part)) for part in parts]
    clauses = tuple(clause for clause in parsed if clause is not None)
    if len(clauses) < len(parts) or len(parts) > 3:
        return clauses, 0.0
    coherent = all(
        before.valence is None or after.valence is None or ((before.valence >= 0.5) == (after.valence >= 0.5)) == (joint != "but")
        for joint, before, after in zip(joints, clauses, clauses[1:], strict=False)
    )
    return clauses, 1.0 if coherent else 0.5
