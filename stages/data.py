"""Stage data: one data set as Arrow, from the embedded world, a file, a folder, a hub or a mixture; every row checked first of all."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages import arrow, forms, manifest
from stages.errors import UserError

_READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}


def run(context) -> None:
    params = context.params
    drops: Counter[str] = Counter()
    if "mixture" in params:
        rows, seen = _mixed(context, params)
    elif params["source"] == "synthetic":
        rows = list(_synthetic(params))
        seen = len(rows)
    else:
        rows, seen = _given(context, params, drops)
    left_out = ", ".join(f"{count} {reason}" for reason, count in drops.most_common())
    if not rows:
        raise UserError(f"data.{context.model}: no rows are left of {seen}" + (f" ({left_out})" if drops else "; the source is empty"))
    if len({row["id"] for row in rows}) != len(rows):
        raise UserError(f"data.{context.model}: two rows have the same id; ids must differ")
    if drops:
        context.log(f"{len(rows)} rows from {seen}; left out: {left_out}")
    context.facts |= {"rows": len(rows), "seen": seen, "drops": dict(sorted(drops.items()))}
    arrow.write(context.out / "data.arrow", arrow.DATA[params["kind"]], rows)


def _synthetic(params: dict[str, Any]) -> Iterator[dict[str, Any]]:
    from stages.world import reviews

    kind, seed, rows = params["kind"], params["seed"], params["rows"]
    if kind == "texts":
        return ({"id": f"text-{seed}-{i:06d}", "text": text} for i, text in enumerate(reviews.corpus(seed, rows)))
    if kind == "demonstrations":
        made = reviews.demonstrations(seed, rows)
    elif kind == "rated":
        pairs = reviews.preferences(seed, rows, params["noise"]) if params["noise"] else reviews.noiseless_pairs(seed, rows)
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


def _given(context, params: dict[str, Any], drops: Counter[str]) -> tuple[list[dict[str, Any]], int]:
    """(rows of ours, rows looked at) of a file, a folder of `datasets` or a hub data set, in its order."""
    found = _open(context, params)
    name, kind, columns = context.model, params["kind"], params.get("columns", {})
    has = lambda field: all(root in found.column_names for root in forms.roots(columns.get(field, field)))
    form = forms.choose(kind, has)
    if form is None:
        given = next((f for f in columns if not has(f)), None)
        named = f"no column '{columns[given]}'" if given else f"no column '{_missing(kind, has)}'"
        raise UserError(
            f"data.{name}: {named} in '{params['source']}'; it has {', '.join(found.column_names)}. A data set of kind {kind} "
            f"wants {forms.wanted(kind)}; say which column is which: data.{name}.columns: {{ours: theirs}}"
        )
    taken = range(min(params.get("rows") or len(found), len(found)))
    if params.get("sample"):
        taken = sorted(random.Random(params.get("seed", 0)).sample(range(len(found)), len(taken)))
    needed, optional, make = form
    absent = next((field for field in columns if field != "id" and not has(field)), None)
    if absent:
        raise UserError(
            f"data.{name}.columns.{absent}: no column '{columns[absent]}' in '{params['source']}'; it has {', '.join(found.column_names)}"
        )
    fields = [*needed, *(field for field in optional if has(field))]
    identity = columns.get("id", "id")
    rows: list[dict[str, Any]] = []
    for i, row in zip(taken, found.select(taken)):
        at = str(row[identity]) if identity in found.column_names else f"{name}-{i:08d}"
        try:
            made = list(make({field: forms.value(row, columns.get(field, field)) for field in fields}))
        except forms.Drop as reason:
            drops[str(reason)] += 1
            continue
        rows += [{"id": at if len(made) == 1 else f"{at}-{n}", **one} for n, one in enumerate(made)]
    return rows, len(taken)


def _missing(kind: str, has) -> str:
    """The first column that the form most of whose columns are there lacks."""
    nearest = max(forms.FORMS[kind], key=lambda form: sum(map(has, form[0])) / len(form[0]))
    return next(field for field in nearest[0] if not has(field))


def _open(context, params: dict[str, Any]):
    import datasets

    datasets.disable_progress_bars()
    source, name = params["source"], context.model
    if source.startswith("hf:"):
        return datasets.load_dataset(source[3:], params.get("subset"), split=params.get("split", "train"), revision=params.get("revision"))
    path = context.root / source
    if path.is_dir():
        made = datasets.load_from_disk(str(path))
        if isinstance(made, dict):
            split = params.get("split", "train")
            if split not in made:
                raise UserError(f"data.{name}.split: '{source}' has no split '{split}'; it has {', '.join(made)}")
            made = made[split]
        return made
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    reader = _READERS.get(suffix)
    if reader is None:
        raise UserError(f"data.{name}.source: '{source}' has none of the known endings {', '.join(_READERS)} (or .gz)")
    if manifest.hash_file(path) != params["pin"]:
        raise UserError(f"data.{name}.source: '{path.name}' changed while the workflow ran; run it again")
    if path.stat().st_size == 0:
        raise UserError(f"data.{name}.source: '{source}' is empty")
    try:
        return datasets.load_dataset(reader, data_files=str(path), split="train", cache_dir=str(context.work / "datasets"))
    except Exception as error:  # the library has many; its first line says what is wrong with the file
        cause = error.__cause__ or error
        raise UserError(f"data.{name}.source: '{source}' cannot be read as {reader}: {str(cause).splitlines()[0]}") from error


def _mixed(context, params: dict[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Rows of other data sets in the shares that their weights say, drawn by the seed; each row at most once."""
    tables = {name: arrow.read(context.input(name) / "data.arrow").to_pylist() for name in params["mixture"]}
    whole = sum(params["mixture"].values())
    total = params["rows"] or int(min(len(tables[name]) * whole / weight for name, weight in params["mixture"].items()))
    rows = []
    for name, weight in params["mixture"].items():
        share = round(total * weight / whole)
        if share > len(tables[name]):
            raise UserError(
                f"data.{context.model}: {share} rows of '{name}' are wanted and it has {len(tables[name])}; lower rows, or its weight"
            )
        chosen = random.Random(f"{params['seed']}/{name}").sample(range(len(tables[name])), share)
        rows += [tables[name][i] | {"id": f"{name}/{tables[name][i]['id']}"} for i in sorted(chosen)]
    return rows, sum(map(len, tables.values()))
