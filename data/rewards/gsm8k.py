"""A reward for grade-school mathematics: 1 where the last number of a response is the reference's, else 0."""

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right_answer(prompts: list[str], responses: list[str], references: list[str]) -> list[float]:
    """References are GSM8K answers, whose result follows `####`."""
    return [float(_last(response) == _last(reference.split("####")[-1])) for response, reference in zip(responses, references)]


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
