"""What is there, what can be had without computing, and what has to be computed: asked before Snakemake builds its graph.

Every artifact's run key is found from the contents of its inputs, in place or on record, and nothing but an artifact with
that very key is taken for it: no time stamp, no memory of earlier runs. What is stored is linked, what a DVC remote holds
and something needs is fetched, both verified; Snakemake is left with what must be computed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages import lineage, manifest, pointers
from stages.keys import packages, run_key
from stages.plan import STAGES, Node, Plan
from stages.store import OPTIMIZER, Store, open_store
from stages.targets import Target

IN_PLACE, CACHED, REMOTE, COMPUTE = "in place", "cached", "remote", "compute"


@dataclass
class Found:
    """An artifact's state. `content` is known when its result is, here or elsewhere; `stale`: another result lies in its place."""

    state: str
    why: str = ""
    key: str | None = None
    content: str | None = None
    stale: bool = False
    trimmed: bool = False


class Resolution:
    """The states of all that some targets need. `wanted` and `compute` are complete after `settle`."""

    def __init__(self, plan: Plan, targets: Iterable[Target], root: Path, nodes: Iterable[Node] = ()):
        self.plan, self.root, self.targets = plan, root, list(targets)
        self.core: dict[str, Node] = {node.path: node for node in nodes}
        for target in self.targets:
            self.core |= target.core
        self.closure = plan.closure(*self.core.values())
        self.found: dict[str, Found] = {}
        self.compute: set[str] = set()
        self.linkable: set[str] = set()
        """In a dry run: what a real one would link or fetch."""
        self.notes: list[str] = []
        self._look()
        if any(f.state != IN_PLACE for f in self.found.values()) and self._learn():
            self._look()

    @cached_property
    def store(self) -> Store:
        return open_store(str(self.root))

    # -- looking ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self.found = {}
        for path, node in self.closure.items():
            self.found[path] = self._state(node)

    def _state(self, node: Node) -> Found:
        lying = _manifest(self.root / node.path)
        unknown = [name for name, i in node.inputs.items() if self.found[i.path].content is None]
        if unknown:
            return Found(COMPUTE, f"waits for {unknown[0]}: {node.inputs[unknown[0]].path}", stale=lying is not None)
        key, parts = run_key(node.job, {name: self.found[i.path].content for name, i in node.inputs.items()})
        if lying is not None and lying["key"] == key:
            missing = [n for n, e in lying["outputs"].items() if not _has(self.root / node.path / n, e["size"])]
            missing += _exchanged(self.root / node.path, lying, missing)
            if not [n for n in missing if not n.startswith(OPTIMIZER)]:
                return Found(IN_PLACE, key=key, content=lying["content"], trimmed=bool(missing))
            why = f"{missing[0]} is missing or not whole"
        else:
            why = difference(lying, parts, node) if lying is not None else "not made yet"
        record = self.store.record(key)
        stale = lying is not None
        if record is None:
            return Found(COMPUTE, why, key, stale=stale)
        content = record["manifest"]["content"]
        lacking = self.store.lacks(record["files"].values())
        trimmed = any(n not in record["files"] for n in record["manifest"]["outputs"])
        if not lacking:
            return Found(CACHED, why, key, content, stale, trimmed)
        if self.store.remote and key in self._tracked:
            return Found(REMOTE, why, key, content, stale, trimmed)
        return Found(COMPUTE, "its files are neither here nor in a remote", key, content, stale)

    @cached_property
    def _tracked(self) -> set[str]:
        return {pointer["meta"]["run_key"] for _, pointer in pointers.all_pointers(self.root)}

    def _learn(self) -> bool:
        """Records of results that pointers carry with them; True when there was something new."""
        new = False
        for name in self.plan.pointers:
            pointer = pointers.read(self.root / pointers.FOLDER / f"{name}.dvc")
            if pointer is None or self.store.record(pointer["meta"]["run_key"]):
                continue
            oid = pointers.lineage_object(pointer)
            if oid is None or not self._whole(oid):
                where = f"the remote '{self.store.remote}'" if self.store.remote else "this machine's cache, and no remote is configured"
                self.notes.append(f"{name}.dvc: its history is not in {where}; `dvc push` it where it was made, or it is computed here")
                continue
            for key, record in lineage.read(self.store.path(oid)):
                self.store.remember(key, record)
                new = True
        return new

    def _whole(self, oid: str) -> bool:
        """Whether an object is here, or comes from the remote, with the bytes that its name says."""
        for _ in range(2):
            if self.store.fetch([oid]):
                return False
            if manifest.hash_file(self.store.path(oid), "md5") == oid:
                return True
            self.store.put_away(oid)
        return False

    # -- settling -----------------------------------------------------------------------------------------------------

    def settle(self, *, dry: bool, say: Callable[[str], None] = lambda line: None) -> None:
        """Put in place what needs no computing (unless dry), and list the rest in `compute`."""
        wanted, whole = set(self.core) | self._lost(), set()
        linked = fetched = 0
        for path, node in reversed(self.closure.items()):
            f = self.found[path]
            if path in whole and f.trimmed:
                f.state, f.why, f.stale = COMPUTE, "its optimizer state was trimmed, and what continues it needs it", True
                if not dry:
                    self.store.forget(f.key)  # or the job would only restore it, as trimmed as it is
            if f.state == CACHED or (f.state == REMOTE and path in wanted):
                if dry:
                    self.linkable.add(path)
                    continue
                if f.state == REMOTE:
                    say(f"fetching {path.split('/', 2)[2]} from the DVC remote '{self.store.remote}'")
                    self.store.fetch(self.store.record(f.key)["files"].values())
                if self._put_in_place(node, f, say):
                    linked, fetched = linked + (f.state == CACHED), fetched + (f.state == REMOTE)
                    f.state = IN_PLACE
                    continue
                f.state, f.why = COMPUTE, "its copy in the store is damaged or incomplete"
                wanted.add(path)
            if path in wanted and f.state == COMPUTE:
                self.compute.add(path)
                wanted |= {i.path for i in node.inputs.values()}
                whole |= {i.path for name, i in node.inputs.items() if name == "previous"}
        if linked or fetched:
            counts = [(linked, "linked from the cache"), (fetched, "fetched from the remote")]
            say(f"without computing: {', '.join(f'{n} {how}' for n, how in counts if n)}")

    def _put_in_place(self, node: Node, f: Found, say: Callable[[str], None]) -> bool:
        """Link an artifact; a damaged object is put away, said, and fetched once from the remote if that may have it."""
        from stages import runner

        for attempt in range(2):
            if runner.put_in_place(self.root, node.job, f.key, self.store):
                return True
            for damaged in self.store.quarantined:
                say(f"damaged: {damaged}; {node.path} is {'fetched or ' if self.store.remote else ''}made again")
            self.store.quarantined.clear()
            if attempt or self.store.remote is None or f.key not in self._tracked:
                return False
            if self.store.fetch(self.store.record(f.key)["files"].values()):
                return False
        return False

    def _lost(self) -> set[str]:
        """Models that pointers name and that are nowhere any more, neither here nor in a remote."""
        named = {name: node.path for target in self.targets for name, node in target.pointers.items()}
        lost = {name: path for name, path in named.items() if self.found[path].state == COMPUTE}
        return {path for name, path in lost.items() if (self.root / pointers.FOLDER / f"{name}.dvc").exists()}

    def stale(self) -> set[str]:
        """Manifests in whose place another result lies: Snakemake must not take them for done."""
        return {f"{path}/{manifest.NAME}" for path in self.compute if self.found[path].stale}

    def summary(self) -> str:
        """One line: how many artifacts are there, can be had, must be computed."""
        counts = Counter(self.found[path].state for path in self.linkable)
        here = sum(f.state == IN_PLACE for p, f in self.found.items() if p not in self.compute)
        parts = [f"{here} in place"]
        if counts[CACHED]:
            parts.append(f"{counts[CACHED]} to link from the cache")
        if counts[REMOTE]:
            parts.append(f"{counts[REMOTE]} to fetch from the remote '{self.store.remote}'")
        unneeded = len(self.closure) - here - len(self.linkable) - len(self.compute)
        if unneeded:
            parts.append(f"{unneeded} not needed")
        return f"{len(self.closure)} artifacts: {', '.join(parts)}, {len(self.compute)} to compute"

    # -- what follows from artifacts -----------------------------------------------------------------------------------

    def report_is_current(self, target: Target) -> bool:
        """Whether a target's own report is, and the common summary shows it, not what another configuration made since."""
        made = {p: self.found[p].content for p in target.job["evaluations"].values()}
        folder, name = self.root / "results/report", target.job["target"]
        try:
            found = json.loads((folder / f"{name}.json").read_text())
            shown = found["rows"] if target.job["sweep"] else json.loads((folder / "summary.json").read_text())
            whole = (folder / f"{name}.md").exists() and all(row in shown for row in found["rows"])
            return whole and found["job"] == target.job and found["made"] == made
        except (FileNotFoundError, ValueError, KeyError):
            return False

    def pointer_is_current(self, name: str) -> bool:
        pointer = pointers.read(self.root / pointers.FOLDER / f"{name}.dvc")
        return pointer is not None and pointer["meta"]["run_key"] == self.found[self.plan.pointers[name].path].key

    def behind(self) -> set[str]:
        """Pointers and reports that are not what their artifacts are, where those are all in place."""
        files = set()
        for target in self.targets:
            if not (self.compute | self.linkable) & set(target.core):
                files |= {f"{pointers.FOLDER}/{p}.dvc" for p in self.pointers(target) if not self.pointer_is_current(p)}
                if not self.report_is_current(target):
                    files.add(f"results/report/{target.job['target']}.json")
        return files

    @cached_property
    def left_behind(self) -> set[str]:
        """`behind`, asked once: when everything that could be is in place."""
        return self.behind()

    def catch_up(self) -> None:
        """Write pointers and reports that are behind, when nothing is left to compute."""
        behind = set() if self.compute else self.behind()
        for name, node in self.plan.pointers.items():
            if f"{pointers.FOLDER}/{name}.dvc" in behind:
                pointers.write({"pointer": name, "artifact": node.path})
        for target in self.targets:
            if f"results/report/{target.job['target']}.json" in behind:
                from stages import report  # pyarrow, which most runs do not need here

                report.run(target.job)

    def pointers(self, target: Target) -> list[str]:
        """Pointers that a target writes: of what is here. One that names what a remote holds stays as it is."""
        return [p for p, node in target.pointers.items() if self.found[node.path].state in (IN_PLACE, CACHED) or node.path in self.compute]


def difference(lying: dict[str, Any], parts: dict[str, Any], node: Node) -> str:
    """Why a result with this manifest is not the one wanted."""
    from stages import fingerprint

    if lying["plan"] != parts["plan"]:
        return "another configuration's result lies there"
    if lying["code"] != parts["code"]:
        now = {m: digest[:12] for m, digest in fingerprint.modules(*STAGES[node.stage].code).items()}
        changed = sorted(m for m in now.keys() | lying["modules"].keys() if now.get(m) != lying["modules"].get(m))
        return f"code changed: {', '.join(changed) or parts['code']}"
    if lying["packages"] != packages(node.stage):
        changed = [f"{a} -> {b}" for a, b in zip(lying["packages"], parts["packages"]) if a != b]
        return f"packages changed: {', '.join(changed)}"
    changed = [n for n, content in parts["inputs"].items() if lying["inputs"].get(n, {}).get("content") != content]
    return f"inputs changed: {', '.join(f'{n} ({node.inputs[n].path})' for n in changed)}"


def _manifest(artifact: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((artifact / manifest.NAME).read_bytes())
        return found if {"key", "outputs", "content", "modules"} <= found.keys() else None
    except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
        return None


def _exchanged(artifact: Path, made: dict[str, Any], missing: list[str]) -> list[str]:
    """Files that were written since the artifact was published (by hand, by `dvc checkout`) and hold other bytes now."""
    try:
        written = json.loads((artifact / "run_info.json").read_bytes()).get("written", {})
    except (FileNotFoundError, ValueError):
        written = {}
    touched = [n for n in made["outputs"] if n not in missing and (artifact / n).stat().st_mtime_ns != written.get(n)]
    return [n for n in touched if manifest.hash_file(artifact / n) != made["outputs"][n]["sha256"]]


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
