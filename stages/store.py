"""The artifact store: DVC's own cache layout, and a record for every run key, so that nothing is computed twice.

The one module that knows DVC. Objects are what `dvc push`, `pull` and `gc` see; a record says which files a run key
made. Contents are hashed again whenever they are used: DVC trusts read-only objects even when they are damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from stages import manifest
from stages.errors import UserError

OPTIMIZER = "optimizer/"
"""What may be freed of an artifact that something else continues: it still counts as whole."""
_LOCK = threading.Lock()


class Store:
    """The store of the project at `root` (its `.dvc` folder says where the cache is)."""

    def __init__(self, root: Path):
        from dvc.exceptions import DvcException, NotDvcRepoError
        from dvc.repo import Repo
        from dvc.scm import SCMError

        logging.getLogger("dvc_data").setLevel(logging.ERROR)
        try:
            self.repo = Repo(str(root))
        except NotDvcRepoError:
            raise UserError(f"{root}: no DVC repository; run `dvc init` there, or work in a clone of the project") from None
        except (DvcException, SCMError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{root}: {reason}; outside of git, `dvc config core.no_scm true` makes DVC work without it") from None
        self.cache = self.repo.cache.local
        folder = Path(self.cache.path).parent.parent
        self.records, self.quarantine = folder / "rlhf-runs", folder / "quarantine"
        self.quarantined: list[str] = []
        """Damaged objects found since the store was opened."""

    # -- records ------------------------------------------------------------------------------------------------------

    def record(self, key: str) -> dict[str, Any] | None:
        """What a run key made: {files: path -> object, manifest, perhaps info}, or None."""
        try:
            return json.loads(self._record(key).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def all_records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(self.records.glob("??/*.json")):
            if found := self.record(path.stem):
                yield path.stem, found

    def remember(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record, unless there is one already."""
        if self.record(key) is None:
            manifest.write_json(self._record(key), record)

    def forget(self, key: str) -> None:
        self._record(key).unlink(missing_ok=True)

    def replace(self, key: str, record: dict[str, Any]) -> None:
        manifest.write_json(self._record(key), record)

    def _record(self, key: str) -> Path:
        return self.records / key[:2] / f"{key}.json"

    # -- objects ------------------------------------------------------------------------------------------------------

    def path(self, oid: str) -> Path:
        """Where an object lies in the cache."""
        return Path(self.cache.oid_to_path(oid))

    def objects(self) -> list[str]:
        """Names of all objects in the cache, sorted."""
        return sorted(path.parent.name + path.name for path in Path(self.cache.path).glob("??/*") if len(path.name) in (30, 34))

    def tree(self, oid: str) -> list[str]:
        """Objects that a folder's object lists; none when it is not here."""
        try:
            return [entry["md5"] for entry in json.loads(self.path(oid).read_text())]
        except (FileNotFoundError, ValueError):
            return []

    def tracked(self) -> set[str]:
        """Every object that any .dvc file or dvc.lock of the workspace names: ours and the user's own.

        Raises UserError when DVC cannot read one of them.
        """
        from dvc.exceptions import DvcException

        try:
            used = self.repo.used_objs(force=True)  # also where a folder's list is in a remote only
        except DvcException as error:
            raise UserError(f"{self.repo.root_dir}: DVC: {error.__cause__ or error}; mend the file that it names") from None
        found = {info.value for infos in used.values() for info in infos}
        return found | {oid for tree in found if tree.endswith(".dir") for oid in self.tree(tree)}

    def lacks(self, oids: Iterable[str]) -> list[str]:
        """Those objects that are not in the local cache."""
        return [oid for oid in oids if not self.path(oid).is_file()]

    def add(self, path: Path) -> tuple[str, dict[str, str]]:
        """Move a file, or the files of a folder, into the cache, leaving links; (object's name, file -> object)."""
        from dvc_data.hashfile.build import build
        from dvc_data.hashfile.transfer import transfer
        from dvc_objects.fs.local import LocalFileSystem

        with _LOCK:
            staging, _, made = build(self.cache, str(path), LocalFileSystem(), "md5")
            result = transfer(staging, self.cache, {made.hash_info}, hardlink=True, shallow=False)
            if result.failed:
                raise UserError(f"{self.cache.path}: could not store {path.name}; is there disk space?")
        files = {e["relpath"]: e["md5"] for e in made.as_list()} if path.is_dir() else {}
        return made.hash_info.value, files

    def put(self, key: str, folder: Path, made: dict[str, Any], info: dict[str, Any]) -> None:
        """Store a finished folder under its run key; info: when, where and how it was made, of no consequence."""
        _, files = self.add(folder)
        self.replace(key, {"files": files, "manifest": made, "info": info})

    def adopt(self, artifact: Path, made: dict[str, Any]) -> dict[str, Any]:
        """Store an artifact that lies in its place and has no record; returns its record."""
        files: dict[str, str] = {}
        for top in sorted({name.split("/")[0] for name in made["outputs"]}):
            path = artifact / top
            if not path.exists() and top == OPTIMIZER.rstrip("/"):
                continue  # freed
            oid, inner = self.add(path)
            files |= {f"{top}/{name}": one for name, one in inner.items()} if path.is_dir() else {top: oid}
        self.remember(made["key"], {"files": files, "manifest": made})
        return {"files": files, "manifest": made}

    def restore(self, key: str, folder: Path) -> dict[str, Any] | None:
        """Link what a run key made into `folder` and return its manifest; None when it is not (or no longer whole) here.

        An object whose content is not what the manifest says is moved to `quarantine/` beside the cache: the record is then
        incomplete, and the artifact counts as absent until the object comes back or is made again.
        """
        record = self.record(key)
        if record is None or self.lacks(record["files"].values()):
            return None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, oid in record["files"].items():
            _link(self.path(oid), folder / name)
        expected = record["manifest"]["outputs"]
        found = zip(record["files"], manifest.hash_files(folder / name for name in record["files"]))
        damaged = {record["files"][name] for name, digest in found if digest != expected[name]["sha256"]}
        if damaged:
            shutil.rmtree(folder)
            for oid in sorted(damaged):
                self.put_away(oid)
            return None
        return record["manifest"]

    def put_away(self, oid: str) -> None:
        """Move a damaged object out of the cache."""
        self.quarantine.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            self.path(oid).replace(self.quarantine / oid)
        self.quarantined.append(str(self.quarantine / oid))

    # -- remote -------------------------------------------------------------------------------------------------------

    @cached_property
    def remote(self) -> str | None:
        """Name of the remote that `dvc push` and `pull` use."""
        return self.repo.config["core"].get("remote")

    def fetch(self, oids: Collection[str]) -> list[str]:
        """Bring objects from the remote into the cache, as `dvc fetch` does; returns those that it does not have.

        Raises UserError when the remote cannot be reached.
        """
        from dvc_data.hashfile.hash_info import HashInfo

        missing = self.lacks(oids)
        if not missing or self.remote is None:
            return missing
        logging.getLogger("dvc.data_cloud").setLevel(logging.ERROR)
        try:
            self.repo.cloud.pull([HashInfo("md5", oid) for oid in missing])
        except Exception as error:  # each kind of remote has errors of its own
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"DVC remote '{self.remote}': {reason}; mend it, or take it out with `dvc remote remove {self.remote}`"
            ) from None
        return self.lacks(missing)


def _link(source: Path, target: Path) -> None:
    """A hard link, or a copy where the file system has none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


@lru_cache(maxsize=8)
def open_store(root: str) -> Store:
    return Store(Path(root))
