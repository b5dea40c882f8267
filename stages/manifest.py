"""manifest.json: the only thing that downstream rules trust. Deterministic: no times, no hosts, no paths of one machine."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from stages.errors import UserError

NAME = "manifest.json"
HASHING = min(8, os.cpu_count() or 1)
"""Threads that hash; hashing releases the interpreter."""


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def hash_tree(folder: Path) -> dict[str, dict[str, Any]]:
    """Relative path -> {sha256, size} of every file below folder, sorted."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): {"sha256": digest, "size": path.stat().st_size} for path, digest in zip(files, hash_files(files))
    }


def hash_files(paths: Iterable[Path]) -> Iterator[str]:
    """sha256 of each, in order, several at a time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(HASHING) as pool:
        yield from pool.map(hash_file, paths)


def read(artifact: Path) -> dict[str, Any]:
    """The manifest of an artifact folder. Raises UserError when there is none or it is not whole."""
    path = artifact / NAME
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; run snakemake for what makes it") from None
    except ValueError:
        raise UserError(f"{path}: damaged; delete it and run snakemake again") from None


def of_job(made: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a result under the names of a job: other models may have the same result."""
    inputs = {name: made["inputs"][name] | {"path": path} for name, path in job["inputs"].items()}
    return made | {"model": job["model"], "inputs": inputs}


def write_text(path: Path, text: str) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
