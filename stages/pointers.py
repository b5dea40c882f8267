"""DVC's pointers to finished models and their evaluations: data/checkpoints/<artifact>.dvc, with the run key in `meta`.

Beside each lies its lineage, <artifact>.jsonl, which DVC tracks and git ignores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages import lineage, manifest
from stages.errors import UserError
from stages.store import open_store

FOLDER = Path("data/checkpoints")


def write(job: dict[str, Any]) -> None:
    """Write the pointer that a job names: the artifact's files, its critic and optimizer included, and its lineage."""
    artifact, name = Path(job["artifact"]), job["pointer"]
    made, store = manifest.read(artifact), open_store(str(Path.cwd()))
    tops = sorted({output.split("/")[0] for output in made["outputs"]} & set(os.listdir(artifact)))
    paths = [artifact / top for top in tops]
    history = FOLDER / f"{name}.jsonl"
    lineage.write(history, store, artifact, Path.cwd())
    pointer = {
        "wdir": os.path.relpath(".", FOLDER),
        "outs": [_out(store, path) for path in [*paths, history]],
        "meta": {"run_key": made["key"], "stage": made["stage"], "model": made["model"], "artifact": str(artifact)},
    }
    import yaml

    manifest.write_text(FOLDER / f"{name}.dvc", yaml.safe_dump(pointer, sort_keys=False))


def _out(store, path: Path) -> dict[str, Any]:
    oid, files = store.add(path)
    sizes = [p.stat().st_size for p in ([path / f for f in files] if files else [path])]
    out = {"md5": oid, "size": sum(sizes), "hash": "md5", "path": str(path)}
    return out | ({"nfiles": len(files)} if files else {})


def read(path: Path) -> dict[str, Any] | None:
    """A pointer of ours, or None when there is none. Raises UserError when the file is damaged."""
    import yaml

    try:
        found = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        return found if found.get("meta", {}).get("run_key") and found["outs"] else None
    except FileNotFoundError:
        return None
    except (yaml.YAMLError, AttributeError, KeyError, TypeError):
        raise UserError(f"{path}: not a DVC pointer; take it from git again, or delete it") from None


def all_pointers(root: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((root / FOLDER).glob("*.dvc")):
        if found := read(path):
            yield path.stem, found


def lineage_object(pointer: dict[str, Any]) -> str | None:
    """The object with a pointer's lineage."""
    return next((out["md5"] for out in pointer["outs"] if out["path"].endswith(".jsonl")), None)
