"""Responses one by one, each with its prompt and whether it is desirable: rated rows, or pairs split in two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stages import arrow
from stages.encoded import conversations


@dataclass(frozen=True)
class Rated:
    rows: list[tuple[str, str, list[int], list[int], bool]]
    """(id, answer column, prompt ids, response ids, desirable)."""
    drops: dict[str, int]


def load(context, folder: Path) -> Rated:
    """The input `data`, tokenized for the model in `folder`."""
    table = arrow.read(context.input("data") / "data.arrow")
    if "chosen" in table.column_names:
        chat = conversations(context, "data", ("chosen", "rejected"), folder)
        rows = [
            (id_, name, prompt, chat[name][i], name == "chosen")
            for i, (id_, prompt) in enumerate(zip(chat["ids"], chat["prompts"]))
            for name in ("chosen", "rejected")
        ]
        return Rated(rows, chat["drops"])
    chat = conversations(context, "data", ("response",), folder)
    label = dict(zip(table["id"].to_pylist(), table["label"].to_pylist()))
    return Rated([(i, "response", p, r, label[i]) for i, p, r in zip(chat["ids"], chat["prompts"], chat["response"])], chat["drops"])


def reference(context) -> dict[tuple[str, str], float]:
    """(id, answer) -> the reference's log-probability of the whole response."""
    table = arrow.read(context.input("reference") / "reference.arrow")
    return dict(zip(zip(table["id"].to_pylist(), table["answer"].to_pylist()), table["logprob"].to_pylist()))
