"""Rows of an input as token ids: sampled ones as they were sampled, texts by the chat template."""

from __future__ import annotations

from pathlib import Path

from stages import arrow


def conversations(context, name: str, answers: tuple[str, ...], folder: Path) -> dict:
    """{"ids", "prompts", <answer>: token ids, "drops"} of an input's data.arrow, for the tokenizer in `folder`."""
    table = arrow.read(context.input(name) / "data.arrow")
    if "prompt_ids" in table.column_names:
        columns = {answer: table[f"{answer}_ids"].to_pylist() for answer in answers}
        return {"ids": table["id"].to_pylist(), "prompts": table["prompt_ids"].to_pylist(), **columns, "drops": {}}
    return context.cluster.apply("stages.tokens:conversations", folder=str(folder), rows=table.to_pylist(), answers=answers)
