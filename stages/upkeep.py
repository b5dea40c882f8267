"""Looking after the store: `verify` hashes everything again, `gc` frees what no pointer and no run names."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages import locks, manifest, pointers
from stages.errors import UserError
from stages.store import OPTIMIZER, Store

Track = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""Shows progress over an iterable: (items, what, how many)."""


def verify(store: Store, root: Path, track: Track) -> list[str]:
    """Every object against its name, every artifact in place against its manifest; a line for each that was damaged.

    Damaged objects go to quarantine, with the records that name them; a damaged artifact loses its manifest: nothing uses
    it, and the next run restores it or makes it again.
    """
    faults = []
    objects = store.objects()
    with ThreadPoolExecutor(manifest.HASHING) as pool:
        right = pool.map(lambda o: manifest.hash_file(store.path(o), "md5") == o.removesuffix(".dir"), objects)
        damaged = {oid for oid, same in zip(objects, track(right, "objects", len(objects))) if not same}
        for oid in sorted(damaged):
            store.put_away(oid)
            faults.append(f"object {oid}: damaged; moved to {store.quarantine / oid}")
        for key, record in store.all_records() if damaged else ():
            if damaged & set(record["files"].values()):
                store.forget(key)
                faults.append(
                    f"record {key[:12]} ({record['manifest']['model']}, {record['manifest']['stage']}): no longer whole; forgotten"
                )
        artifacts = [path.parent for path in sorted((root / "results/store").rglob(manifest.NAME))]
        for artifact, broken in zip(artifacts, track(pool.map(_broken, artifacts), "artifacts", len(artifacts))):
            if broken:
                (artifact / manifest.NAME).unlink()
                faults.append(f"{artifact.relative_to(root)}: {', '.join(broken)} damaged or missing; not used any more")
    return faults


def _broken(artifact: Path) -> list[str]:
    def right(name: str, expected: dict) -> bool:
        path = artifact / name
        if not path.is_file():
            return name.startswith(OPTIMIZER)  # trimmed
        return path.stat().st_size == expected["size"] and manifest.hash_file(path) == expected["sha256"]

    return [name for name, expected in manifest.read(artifact)["outputs"].items() if not right(name, expected)]


@dataclass
class Garbage:
    """What could go: optimizer states that something continues from already, and results that nothing names."""

    trims: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key -> record as it would be without its optimizer."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    """Folders and files in results/store."""
    objects: list[str] = field(default_factory=list)
    optimizer_bytes: int = 0
    object_bytes: int = 0

    def trim(self, key: str, record: dict[str, Any], places: Iterable[Path], pinned: Collection[str]) -> None:
        """Add an artifact's optimizer state, on record and in the folders where the artifact lies."""
        files = record["files"]
        optimizer = [n for n in record["manifest"]["outputs"] if n.startswith(OPTIMIZER) and files.get(n) not in pinned]
        if any(n in files for n in optimizer):
            self.trims[key] = record | {"files": {n: o for n, o in files.items() if n not in optimizer}}
            self.optimizer_bytes += sum(record["manifest"]["outputs"][n]["size"] for n in optimizer)
        self.folders += [place / n for place in places for n in optimizer if (place / n).exists()]


def garbage(store: Store, root: Path, planned: Collection[str]) -> Garbage:
    """What neither a pointer in data/checkpoints/ nor a run in results/runs/ names, directly or as an ancestor, and what
    is not part of the present plan (its run keys): half a run is not garbage. Nothing that DVC tracks otherwise is.

    Raises UserError when the cache is not this project's own: others' results would look like garbage.
    """
    _require_own(store, root)
    found = Garbage()
    records = dict(store.all_records())
    kept = _named(store, root, records)
    kept |= set(planned)
    continued = {i["key"] for key in kept if key in records for name, i in records[key]["manifest"]["inputs"].items() if name == "previous"}
    pinned = _pinned(store, root)
    places: dict[str, list[Path]] = {}
    for path in (root / "results/store").rglob(manifest.NAME):
        places.setdefault(manifest.read(path.parent)["key"], []).append(path.parent)
    for key, record in records.items():
        if key not in kept:
            found.results[key] = record
        elif key in continued:
            found.trim(key, record, places.get(key, []), pinned)
    for key, artifacts in places.items():
        if key not in kept:
            found.folders += artifacts
    needed = pinned | {o for key in kept if key in records for o in found.trims.get(key, records[key])["files"].values()}
    found.objects = [oid for oid in store.objects() if oid not in needed]
    found.object_bytes = sum(store.path(oid).stat().st_size for oid in found.objects)
    return found


def collect(store: Store, found: Garbage) -> None:
    """Free it: records first, so that nothing names an object that is gone; what lies in place last, as a sign of what is not done."""
    for key, record in found.trims.items():
        store.replace(key, record)
    for key in found.results:
        store.forget(key)
    for oid in found.objects:
        store.path(oid).unlink(missing_ok=True)
    for path in found.folders:
        if path.is_dir():
            (path / manifest.NAME).unlink(missing_ok=True)  # not taken for an artifact while it goes
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # other files are left in it
                path.parent.rmdir()


def trim(root: Path, newest: Path, keep: int) -> None:
    """Free the optimizer states of iterations before the last `keep`, of which `newest` is the last.

    What a pointer names, what DVC tracks otherwise, what another result shares and what another job is at stay.
    Raises UserError when the cache is not this project's own, or DVC cannot say what it tracks.
    """
    old = [artifact for artifact in _earlier(root, newest)[keep - 1 :] if any((artifact / OPTIMIZER).glob("*"))]
    if not old:
        return
    store = Store(root)  # which sees what DVC tracks by now
    _require_own(store, root)
    pinned, named = _pinned(store, root), {pointer["meta"]["run_key"] for _, pointer in pointers.all_pointers(root)}
    for artifact in old:
        key = manifest.read(artifact)["key"]
        with contextlib.suppress(BlockingIOError), locks.one_at_a_time(root, key, waiting=_give_up):
            record = store.record(key)
            if record is None or key in named:
                continue
            found = Garbage()
            found.trim(key, record, [artifact], pinned)
            others = {o for other, r in store.all_records() if other != key for o in r["files"].values()}
            kept = pinned | others | set(found.trims.get(key, record)["files"].values())
            found.objects = sorted(set(record["files"].values()) - kept)
            collect(store, found)


def _earlier(root: Path, artifact: Path) -> list[Path]:
    """The iterations before one, the newest first, as far as what it was made from lies there."""
    found, previous = [], manifest.read(artifact)["inputs"].get("previous")
    while previous and (root / previous["path"] / manifest.NAME).exists():
        made = manifest.read(root / previous["path"])
        if made["key"] != previous["key"]:
            break
        found.append(root / previous["path"])
        previous = made["inputs"].get("previous")
    return found


def _give_up() -> None:
    raise BlockingIOError


def _require_own(store: Store, root: Path) -> None:
    if not Path(store.cache.path).resolve().is_relative_to(root.resolve()):
        raise UserError(f"{store.cache.path}: a cache outside of this project, perhaps of several; only a project's own is freed")


def _pinned(store: Store, root: Path) -> set[str]:
    """Objects that pointers name, and all that DVC tracks otherwise."""
    named = {out["md5"] for _, pointer in pointers.all_pointers(root) for out in pointer["outs"]}
    return named | {oid for tree in named if tree.endswith(".dir") for oid in store.tree(tree)} | store.tracked()


def _named(store: Store, root: Path, records: dict[str, dict]) -> set[str]:
    """Keys of artifacts that pointers or runs name, of their evaluations, and of all they were made from."""
    start = {pointer["meta"]["run_key"] for _, pointer in pointers.all_pointers(root)}
    for link in (root / "results/runs").glob("*/*"):
        artifact = link.resolve().parent
        if (artifact / manifest.NAME).exists():
            start.add(manifest.read(artifact)["key"])
    kept: set[str] = set()
    start |= {
        key for key, record in records.items()
        if record["manifest"]["stage"] == "evaluate" and record["manifest"]["inputs"]["policy"]["key"] in start
    }  # fmt: skip
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in kept:
            kept.add(key)
            if key in records:
                waiting += [i["key"] for i in records[key]["manifest"]["inputs"].values()]
    return kept
