"""Data as users have it, row by row: which columns make which kind, and what each row becomes.

A row that cannot be used raises Drop with the reason; the data stage counts it. Nothing is lost silently.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Turns = list[dict[str, str]]
"""[{"role": system | user | assistant, "content": text}], in order."""

_ROLES = {"human": "user", "user": "user", "prompter": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
          "model": "assistant", "system": "system"}  # fmt: skip
_HH = re.compile(r"(?:^|\n\n)(Human|Assistant):(?: |$)")


class Drop(Exception):
    """A row that is left out; the message is the reason, one of few."""


def turns_of(value: Any) -> Turns:
    """Messages {role, content} or ShareGPT's {from, value}, as turns; a text of HH's kind ("\\n\\nHuman: ...") is cut up.

    Raises Drop for an unknown role, a turn without text, or no turn at all.
    """
    if isinstance(value, str):
        parts = _HH.split(value)
        if parts[0].strip() or len(parts) == 1:
            raise Drop("a conversation does not begin with a speaker")
        if len(parts) > 3 and parts[-2] == "Assistant" and not parts[-1].strip():
            parts = parts[:-2]  # "\n\nAssistant:" at a prompt's end asks for the answer
        value = [{"role": role.lower(), "content": text} for role, text in zip(parts[1::2], parts[2::2])]
    if not isinstance(value, (list, tuple)) or not value:
        raise Drop("no turns")
    found = []
    for turn in value:
        if not isinstance(turn, Mapping):
            raise Drop("a turn is not {role, content}")
        role = _ROLES.get(str(turn.get("role", turn.get("from"))).lower())
        text = turn.get("content", turn.get("value"))
        if role is None:
            raise Drop(f"unknown role {turn.get('role', turn.get('from'))!r}")
        if not isinstance(text, str) or not text.strip():
            raise Drop("a turn is empty")
        found.append({"role": role, "content": text.strip()})
    return found


def asked(turns: Turns) -> dict[str, Any]:
    """A prompt from turns that end with the user: `prompt` is the last one's text; `turns` only where there is more than it."""
    if not turns or turns[-1]["role"] != "user":
        raise Drop("the prompt does not end with the user")
    return {"prompt": turns[-1]["content"], "turns": turns if len(turns) > 1 else None}


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, str) for v in value):
        return {"prompt": _text(value[0], "prompt"), "turns": None}  # a list of questions: the first can be asked
    if isinstance(value, str) and not _HH.match(value):
        return {"prompt": _text(value, "prompt"), "turns": None}
    return asked(turns_of(value))


def _text(value: Any, name: str) -> str:
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], Mapping):
        value = turns_of(value)[0]["content"]
    if isinstance(value, (list, tuple, Mapping)):
        raise Drop(f"{name} is not one text")
    if value is None or not str(value).strip():
        raise Drop(f"empty {name}")
    return str(value)


def _texts(row: Mapping) -> Iterator[dict]:
    yield {"text": _text(row["text"], "text")}


def _demonstration(row: Mapping) -> Iterator[dict]:
    yield _prompt(row["prompt"]) | {"response": _text(row["response"], "response")}


def _dialogue(row: Mapping, column: str = "messages") -> Iterator[dict]:
    turns = turns_of(row[column])
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    if not turns:
        raise Drop("no assistant turn")
    yield asked(turns[:-1]) | {"response": turns[-1]["content"]}


def _pair(row: Mapping) -> Iterator[dict]:
    if any(_conversation(row[a]) for a in ("chosen", "rejected")):
        yield from _implicit_pair(row)  # whole conversations, which hold the prompt too
        return
    chosen, rejected = (_text(row[a], a) for a in ("chosen", "rejected"))
    if chosen.strip() == rejected.strip():
        raise Drop("chosen equals rejected")
    yield _prompt(row["prompt"]) | {"chosen": chosen, "rejected": rejected, "margin": row.get("margin")}


def _conversation(value: Any) -> bool:
    if isinstance(value, str):
        return bool(_HH.match(value))
    return isinstance(value, (list, tuple)) and len(value) > 1


def _implicit_pair(row: Mapping) -> Iterator[dict]:
    """Two conversations with a common beginning: the prompt is that, up to the user's last turn before they part."""
    one, other = turns_of(row["chosen"]), turns_of(row["rejected"])
    if one == other:
        raise Drop("chosen equals rejected")
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
    if same == 0 or one[same - 1]["role"] != "user" or same >= min(len(one), len(other)):
        raise Drop("chosen and rejected have no prompt in common")
    if one[same]["role"] != "assistant" or other[same]["role"] != "assistant":
        raise Drop("chosen and rejected do not part at an assistant turn")
    yield asked(one[:same]) | {"chosen": one[same]["content"], "rejected": other[same]["content"], "margin": row.get("margin")}


def _ranked(row: Mapping) -> Iterator[dict]:
    """K answers, best first, or with scores: a pair for every two of different rank."""
    answers = [_text(a, "answer") for a in _listed(row["answers"])]
    scores = [float(s) for s in _listed(row["scores"])] if row.get("scores") is not None else [-float(i) for i in range(len(answers))]
    if len(scores) != len(answers):
        raise Drop("as many scores as answers are wanted")
    prompt = _prompt(row["prompt"])
    pairs = [(i, j) for i in range(len(answers)) for j in range(len(answers)) if scores[i] > scores[j] and answers[i] != answers[j]]
    if not pairs:
        raise Drop("no two answers of different rank")
    for i, j in pairs:
        yield prompt | {"chosen": answers[i], "rejected": answers[j]}


def _listed(value: Any) -> Sequence:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise Drop("answers and scores must be lists") from None
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise Drop("fewer than two answers")
    return value


def _rated(row: Mapping) -> Iterator[dict]:
    label = row["label"]
    if isinstance(label, str):
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.strip().lower())
    if label not in (0, 1):
        raise Drop("label is neither true nor false")
    yield _prompt(row["prompt"]) | {"response": _text(row["response"], "response"), "label": bool(label)}


def _asked(row: Mapping) -> Iterator[dict]:
    reference = row.get("reference")
    yield _prompt(row["prompt"]) | {"reference": None if reference is None else str(reference)}


def _asked_dialogue(row: Mapping) -> Iterator[dict]:
    turns = turns_of(row["messages"])
    while turns and turns[-1]["role"] != "user":
        turns = turns[:-1]
    yield asked(turns) | {"reference": None}


Form = tuple[tuple[str, ...], tuple[str, ...], Callable[[Mapping], Iterator[dict]]]
"""(columns that must be there, columns that may be, rows of ours from one of theirs)."""
FORMS: dict[str, list[Form]] = {
    "texts": [(("text",), (), _texts)],
    "demonstrations": [
        (("prompt", "response"), (), _demonstration),
        (("messages",), (), _dialogue),
        (("conversations",), (), lambda row: _dialogue(row, "conversations")),
    ],
    "preferences": [
        (("prompt", "chosen", "rejected"), ("margin",), _pair),
        (("chosen", "rejected"), ("margin",), _implicit_pair),
        (("prompt", "answers"), ("scores",), _ranked),
    ],
    "rated": [(("prompt", "response", "label"), (), _rated)],
    "prompts": [(("prompt",), ("reference",), _asked), (("messages",), (), _asked_dialogue)],
}


def choose(kind: str, has: Callable[[str], bool]) -> Form | None:
    """The first form of a kind whose columns are all there."""
    return next((form for form in FORMS[kind] if all(map(has, form[0]))), None)


def wanted(kind: str) -> str:
    """The columns of every form of a kind, for a message."""
    return "; or ".join(", ".join(form[0]) for form in FORMS[kind])


_FIELD = re.compile(r"\{([^{}]+)\}")


def value(row: Mapping, column: str) -> Any:
    """A column by name, by path (`instances.0.output`), or several in a template (`{instruction}\\n{input}`)."""
    if _FIELD.search(column):
        return _FIELD.sub(lambda match: _shown(value(row, match[1])), column).strip()
    if column in row:
        return row[column]
    found: Any = row
    for part in column.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, (list, tuple)) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found


def _shown(found: Any) -> str:
    return "" if found is None else str(found)


def roots(column: str) -> list[str]:
    """The source's columns that a column name, path or template reads."""
    parts = _FIELD.findall(column) or [column]
    return [part.split(".")[0] for part in parts]
