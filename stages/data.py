"""Stage data: one data set as Arrow, from the embedded world, a file or a hub; columns and rows checked first of all."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from stages import arrow
from stages.errors import UserError

_REQUIRED = {
    "texts": ("text",),
    "demonstrations": ("prompt", "response"),
    "preferences": ("prompt", "chosen", "rejected"),
    "rated": ("prompt", "response", "label"),
    "prompts": ("prompt",),
}
_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def run(context) -> None:
    params = context.params
    rows = list(_synthetic(params) if params["source"] == "synthetic" else _given(context, params))
    drops: dict[str, int] = {}
    kept = []
    for row in rows:
        empty = next((f for f in _REQUIRED[params["kind"]] if row[f] is None or not str(row[f]).strip()), None)
        if empty:
            drops[f"empty {empty}"] = drops.get(f"empty {empty}", 0) + 1
        else:
            kept.append(row)
    if not kept:
        raise UserError(f"data.{context.model}: no rows are left of {len(rows)}" + (f" ({drops})" if drops else "; the source is empty"))
    if len({row["id"] for row in kept}) != len(kept):
        raise UserError(f"data.{context.model}: two rows have the same id; ids must differ")
    context.facts |= {"rows": len(kept), "drops": drops}
    arrow.write(context.out / "data.arrow", arrow.DATA[params["kind"]], kept)


def _synthetic(params: dict[str, Any]):
    from stages.world import reviews

    kind, seed, rows = params["kind"], params["seed"], params["rows"]
    if kind == "texts":
        return ({"id": f"text-{seed}-{i:06d}", "text": text} for i, text in enumerate(reviews.corpus(seed, rows)))
    if kind == "demonstrations":
        made = reviews.demonstrations(seed, rows)
    elif kind == "rated":
        pairs = reviews.preferences(seed, rows, 0.1)
        made = [
            {"id": f"{r['id']}-{a}", "prompt": r["prompt"], "response": r[a], "label": a == "chosen"}
            for r in pairs
            for a in ("chosen", "rejected")
        ]
    elif kind == "preferences":
        made = reviews.preferences(seed, rows, params["noise"]) if params["noise"] else reviews.noiseless_pairs(seed, rows)
    else:
        made = reviews.eval_prompts(seed, rows) if params["split"] == "eval" else reviews.prompts(seed, rows)
    return ({name: row.get(name) for name in arrow.DATA[kind].names} for row in made)


def _given(context, params: dict[str, Any]):
    """Rows of a file or a hub data set, in its order, with ids of their own where the source has none."""
    import datasets

    datasets.disable_progress_bars()
    source, name, columns = params["source"], context.model, params.get("columns", {})
    if source.startswith("hf:"):
        found = datasets.load_dataset(source[3:], split=params.get("split", "train"), revision=params.get("revision"))
    else:
        path = context.root / source
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise UserError(f"data.{name}.source: '{source}' has none of the known endings {', '.join(_READERS)}")
        _check_pin(name, path, params["pin"])
        if path.stat().st_size == 0:
            raise UserError(f"data.{name}.source: '{source}' is empty")
        try:
            found = datasets.load_dataset(reader, data_files=str(path), split="train", cache_dir=str(context.work / "datasets"))
        except Exception as error:  # the library has many; its first line says what is wrong with the file
            cause = error.__cause__ or error
            raise UserError(f"data.{name}.source: '{source}' cannot be read as {reader}: {str(cause).splitlines()[0]}") from error
    for field in _REQUIRED[params["kind"]]:
        column = columns.get(field, field)
        if column not in found.column_names:
            raise UserError(
                f"data.{name}: no column '{column}' in '{source}'; it has {', '.join(found.column_names)}. "
                f"Say which one is the {field}: data.{name}.columns: {{{field}: ...}}"
            )
    if params.get("rows"):
        found = found.select(range(min(params["rows"], len(found))))
    identity = columns.get("id", "id")
    for i, row in enumerate(found):
        mapped = {field: row[columns.get(field, field)] for field in _REQUIRED[params["kind"]]}
        yield {"id": str(row[identity]) if identity in found.column_names else f"{name}-{i:08d}", **mapped}


def _check_pin(name: str, path: Path, pin: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != pin:
            raise UserError(f"data.{name}.source: '{path.name}' changed while the workflow ran; run it again")
