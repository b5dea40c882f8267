"""Lineage: everything that an artifact was made from, by the keys in manifests, down to the data.

A file of it has a line per artifact, inputs before what is made from them: {key, files, manifest}.
DVC carries it with the pointer, so that a fresh clone knows which results exist, without having any of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages import manifest
from stages.errors import UserError
from stages.store import Store


def ancestry(store: Store, artifact: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Key -> record of an artifact in place and of all it was made from, inputs first.

    Raises UserError when an ancestor is neither on record nor in place.
    """
    made = manifest.read(artifact)
    found: dict[str, dict[str, Any]] = {}
    waiting: list[tuple[dict[str, Any], Path, bool]] = [(made, artifact, False)]
    while waiting:
        at, place, inputs_done = waiting.pop()
        if at["key"] in found:
            continue
        if inputs_done:
            found[at["key"]] = (store.record(at["key"]) or store.adopt(place, at)) | {"manifest": at}
            continue
        waiting.append((at, place, True))
        for made_from in at["inputs"].values():
            if made_from["key"] not in found:
                waiting.append((manifest_of(store, made_from, root), root / made_from["path"], False))
    return found


def manifest_of(store: Store, made_from: dict[str, str], root: Path) -> dict[str, Any]:
    """The manifest of an input, as another manifest names it: {path, key}. Raises UserError when it is not known here."""
    path = root / made_from["path"]
    if (path / manifest.NAME).exists():
        lying = manifest.read(path)
        if lying["key"] == made_from["key"]:
            return lying
    record = store.record(made_from["key"])
    if record is None:
        raise UserError(f"{made_from['path']}: no record of key {made_from['key']}; run snakemake for what it was made for")
    return record["manifest"]


def write(path: Path, store: Store, artifact: Path, root: Path) -> None:
    lines = [
        json.dumps({"key": key, "files": record["files"], "manifest": record["manifest"]}, sort_keys=True, ensure_ascii=False)
        for key, record in ancestry(store, root / artifact, root).items()
    ]
    manifest.write_text(root / path, "\n".join(lines) + "\n")


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, record) of every line."""
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        yield entry.pop("key"), entry
