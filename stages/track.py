"""DVC's pointer to a finished model, in data/checkpoints/, with the run key in `meta`: what push, pull, status and gc read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stages import manifest
from stages.store import Store

CHECKPOINTS = Path("data/checkpoints")


def run(job: dict[str, Any]) -> None:
    """Write data/checkpoints/<model>-<plan id>.dvc for the artifact's `model/` folder."""
    import yaml

    artifact = Path(job["artifact"])
    made, folder = manifest.read(artifact), artifact / "model"
    store = Store(Path.cwd())
    oid = store.add(folder)
    files = [e for name, e in made["outputs"].items() if name.startswith("model/")]
    out = {"md5": oid, "size": sum(e["size"] for e in files), "nfiles": len(files), "hash": "md5", "path": "model"}
    pointer = {
        "wdir": os.path.relpath(artifact, CHECKPOINTS),
        "outs": [out],
        "meta": {"run_key": made["key"], "stage": made["stage"], "model": made["model"], "artifact": str(artifact)},
    }
    manifest.write_text(CHECKPOINTS / f"{job['pointer']}.dvc", yaml.safe_dump(pointer, sort_keys=False))
