"""The artifact store: DVC's own cache layout, and a record for every run key, so that nothing is computed twice.

The one module that knows dvc_data. Objects are what `dvc push`, `pull` and `gc` see; a record says which object a run
key made. Contents are hashed again on restore: DVC trusts read-only objects even when they are damaged.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from stages import manifest
from stages.errors import UserError

_LOCK = threading.Lock()


class Store:
    """The store of the project at `root` (its `.dvc` folder says where the cache is)."""

    def __init__(self, root: Path):
        from dvc.exceptions import NotDvcRepoError
        from dvc.repo import Repo

        logging.getLogger("dvc_data").setLevel(logging.ERROR)
        try:
            self.cache = Repo(str(root)).cache.local
        except NotDvcRepoError:
            raise UserError(f"{root}: no DVC repository; run `dvc init` there, or work in a clone of the project") from None
        self.quarantined: list[str] = []
        """Damaged objects found since the store was opened."""
        self.records = Path(self.cache.path).parent.parent / "rlhf-runs"

    def record(self, key: str) -> dict[str, Any] | None:
        """What a run key made: {object, manifest}, or None."""
        try:
            return json.loads((self.records / key[:2] / f"{key}.json").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def add(self, folder: Path) -> str:
        """Move the files of a folder into the cache, leaving links to them; returns the object's name."""
        from dvc_data.hashfile.build import build
        from dvc_data.hashfile.transfer import transfer
        from dvc_objects.fs.local import LocalFileSystem

        with _LOCK:
            staging, _, made = build(self.cache, str(folder), LocalFileSystem(), "md5")
            result = transfer(staging, self.cache, {made.hash_info}, hardlink=True, shallow=False)
            if result.failed:
                raise UserError(f"{self.cache.path}: could not store {folder.name}; is there disk space?")
        return made.hash_info.value

    def put(self, key: str, folder: Path, made: dict[str, Any]) -> None:
        """Store a finished folder under its run key."""
        manifest.write_json(self.records / key[:2] / f"{key}.json", {"object": self.add(folder), "manifest": made})

    def restore(self, key: str, folder: Path) -> dict[str, Any] | None:
        """Link what a run key made into `folder` and return its manifest; None when it is not (or no longer whole) here.

        An object whose content is not what the manifest says is moved to `quarantine/` beside the cache and counts as absent.
        """
        record = self.record(key)
        if record is None:
            return None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            listed = json.loads(Path(self.cache.oid_to_path(record["object"])).read_text())
            for entry in listed:
                _link(Path(self.cache.oid_to_path(entry["md5"])), folder / entry["relpath"])
            whole = manifest.hash_tree(folder) == record["manifest"]["outputs"]
        except (FileNotFoundError, ValueError, KeyError):
            whole = False
        if not whole:
            self._forget_damaged(key, record)
            return None
        return record["manifest"]

    def _forget_damaged(self, key: str, record: dict) -> None:
        """Move every object of a record whose bytes are not its name away, and drop the record."""
        quarantine = self.records.parent / "quarantine"
        for oid in self._objects(record["object"]):
            path = Path(self.cache.oid_to_path(oid))
            if path.is_file() and _md5(path) != oid.removesuffix(".dir"):
                quarantine.mkdir(exist_ok=True)
                path.replace(quarantine / oid)
                self.quarantined.append(str(quarantine / oid))
        (self.records / key[:2] / f"{key}.json").unlink(missing_ok=True)

    def _objects(self, tree: str) -> list[str]:
        try:
            listed = json.loads(Path(self.cache.oid_to_path(tree)).read_text())
            return [tree, *(entry["md5"] for entry in listed)]
        except (FileNotFoundError, ValueError):
            return [tree]


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _md5(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


@lru_cache(maxsize=8)
def open_store(root: str) -> Store:
    return Store(Path(root))
