"""Schemas of every Arrow output, and how they are written: sorted by key, so that equal content is equal bytes.

Files are Arrow IPC streams, which both `pyarrow.ipc.open_stream` and `datasets.Dataset.from_file` map.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.errors import UserError

_IDS, _FLOATS = pa.list_(pa.int32()), pa.list_(pa.float32())

_TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_PROMPT = [("id", pa.string()), ("prompt", pa.string()), ("turns", _TURNS)]
"""`prompt` is the user's last turn; `turns` the whole conversation that ends with it, where there is more than that."""

DATA = {
    "texts": pa.schema([("id", pa.string()), ("text", pa.string())]),
    "demonstrations": pa.schema([*_PROMPT, ("response", pa.string())]),
    "preferences": pa.schema([*_PROMPT, ("chosen", pa.string()), ("rejected", pa.string()), ("margin", pa.float32())]),
    "rated": pa.schema([*_PROMPT, ("response", pa.string()), ("label", pa.bool_())]),
    "prompts": pa.schema([*_PROMPT, ("reference", pa.string())]),
}
ROLLOUTS = pa.schema(
    [
        ("iteration", pa.int32()),
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("policy", pa.string()),
        ("prompt", pa.string()),
        ("turns", _TURNS),
        ("reference", pa.string()),
        ("prompt_ids", _IDS),
        ("response_ids", _IDS),
        ("logprobs", _FLOATS),
        ("finish_reason", pa.string()),
        ("temperature", pa.float32()),
        ("seed", pa.int64()),
        ("text", pa.string()),
    ]
)
EXPERIENCE = pa.schema(
    [
        *ROLLOUTS,
        ("trainer_logprobs", _FLOATS),
        ("reference_logprobs", _FLOATS),
        ("values", _FLOATS),
        ("scores", pa.map_(pa.string(), pa.float32())),
        ("score", pa.float32()),
        ("shaped_rewards", _FLOATS),
        ("advantages", _FLOATS),
        ("returns", _FLOATS),
        ("used", pa.bool_()),
    ]
)
BEST = pa.schema([*DATA["demonstrations"], ("prompt_ids", _IDS), ("response_ids", _IDS), ("score", pa.float32())])
PAIRS = pa.schema(
    [
        *DATA["preferences"],
        ("prompt_ids", _IDS),
        ("chosen_ids", _IDS),
        ("rejected_ids", _IDS),
        ("chosen_score", pa.float32()),
        ("rejected_score", pa.float32()),
    ]
)
SCORES = pa.schema([("prompt_id", pa.string()), ("sample", pa.int32()), ("score", pa.float32()), ("used", pa.string())])
REFERENCE = pa.schema([("id", pa.string()), ("answer", pa.string()), ("logprob", pa.float64()), ("tokens", pa.int32())])
METRICS = pa.schema([("step", pa.int32()), ("phase", pa.string()), ("name", pa.string()), ("value", pa.float64())])
HELDOUT = pa.schema([("id", pa.string()), ("chosen_score", pa.float32()), ("rejected_score", pa.float32())])
SAMPLES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("response_ids", _IDS),
        ("finish_reason", pa.string()),
        ("gold_reward", pa.float32()),
        ("gold_terms", pa.map_(pa.string(), pa.float32())),
        ("score", pa.float32()),
        ("kl", pa.float32()),
    ]
)
KEYS = ("id", "answer", "iteration", "prompt_id", "sample", "step", "phase", "name")


def write(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows (dicts with exactly the schema's columns), sorted by the key columns that the schema has."""
    rows = list(rows)
    keys = [name for name in schema.names if name in KEYS]
    table = pa.Table.from_pylist(rows, schema=schema)
    if keys:
        table = table.sort_by([(key, "ascending") for key in keys])
    table = table.combine_chunks()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(table)


def read(path: Path) -> pa.Table:
    """Map an Arrow stream file. Raises UserError when it is missing or not whole."""
    try:
        with pa.memory_map(str(path)) as source:
            return pa.ipc.open_stream(source).read_all()
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run snakemake for what makes it") from None
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a whole Arrow stream ({error}); delete it and run snakemake again") from None


def metric_rows(phase: str, metrics: Iterable[tuple[int, str, float]]) -> list[dict[str, Any]]:
    """A trainer's metrics as rows of METRICS."""
    return [{"step": step, "phase": phase, "name": name, "value": value} for step, name, value in metrics]
