"""Rows of an input as token ids: sampled ones as they were sampled, texts by the chat template."""

from __future__ import annotations

from pathlib import Path

from stages import arrow
from stages.cluster.rows import Rows


def conversations(context, name: str, answers: tuple[str, ...], folder: Path) -> dict:
    """{"ids", "prompts", <answer>: token ids, "drops"} of an input's data.arrow, for the tokenizer in `folder`."""
    table = arrow.read(context.input(name) / "data.arrow")
    if "prompt_ids" in table.column_names:
        columns = {answer: table[f"{answer}_ids"].to_pylist() for answer in answers}
        return {"ids": table["id"].to_pylist(), "prompts": table["prompt_ids"].to_pylist(), **columns, "drops": {}}
    found = context.cluster.apply("stages.tokens:conversations", folder=str(folder), rows=table.to_pylist(), answers=answers)
    _say(context, name, len(found["ids"]), found["drops"])
    return found


def dialogues(context, name: str, folder: Path) -> tuple[Rows, dict[str, int]]:
    """Rows of an input's demonstrations, every assistant turn trained; and how many were left out, by reason."""
    table = arrow.read(context.input(name) / "data.arrow")
    if "prompt_ids" in table.column_names:
        return Rows.of(list(zip(table["prompt_ids"].to_pylist(), table["response_ids"].to_pylist()))), {}
    found = context.cluster.apply("stages.tokens:dialogues", folder=str(folder), rows=table.to_pylist())
    _say(context, name, len(found["ids"]), found["drops"])
    return Rows.masked(found["tokens"], found["chosen"]), found["drops"]


def _say(context, name: str, kept: int, drops: dict[str, int]) -> None:
    if drops:
        context.log(f"{name}: {kept} rows are used; left out: {', '.join(f'{n} {reason}' for reason, n in drops.items())}")
