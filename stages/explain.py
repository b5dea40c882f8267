"""Why two artifacts differ, why something would run, and what something was made from: answers out of manifests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.tree import Tree

from stages import lineage, manifest
from stages.errors import UserError
from stages.plan import Plan
from stages.resolve import IN_PLACE, Resolution
from stages.store import Store
from stages.targets import Target

RUNS = Path("results/runs")


def find(name: str, plan: Plan, root: Path) -> Path:
    """The folder of an artifact named by model, by run (`default/ppo`), by folder, or by the beginning of one.

    Raises UserError when nothing, or more than one, has that name.
    """
    if name in plan.final:
        return root / plan.final[name].path
    for path in (root / name, root / "results/store" / name):
        if (path / manifest.NAME).exists():
            return path
    for link in (root / RUNS / name, root / name):
        if (link.resolve().parent / manifest.NAME).exists():
            return link.resolve().parent
    found = sorted(p.parent for p in (root / "results/store").rglob(manifest.NAME))
    starting = [p for p in found if str(p.relative_to(root / "results/store")).startswith(name)]
    if len(starting) == 1:
        return starting[0]
    if starting:
        shown = ", ".join(str(p.relative_to(root / "results/store")) for p in starting[:5])
        raise UserError(f"{name}: {len(starting)} artifacts begin so ({shown}{', ...' if len(starting) > 5 else ''}); say more")
    raise UserError(f"{name}: no such model, run or artifact; `ls results/store results/runs`")


def differences(one: dict[str, Any], other: dict[str, Any], store: Store, root: Path) -> Tree:
    """A tree of reasons; inputs that differ have their own reasons below them."""
    return _differ(one, other, store, root, {}, "")


def _differ(one, other, store, root, seen, name) -> Tree:
    label = f"{name}{one['model']} ({one['stage']}, {one['plan']}) and {other['model']} ({other['stage']}, {other['plan']})"
    tree = Tree(label)
    pair = (one["key"], other["key"])
    if pair in seen:
        tree.add("as above")
        return tree
    seen[pair] = True
    if one["key"] == other["key"]:
        tree.add("same key" + (", same bytes" if one["content"] == other["content"] else ", other bytes:"))
        for file in sorted(one["outputs"].keys() | other["outputs"].keys()):
            if one["outputs"].get(file) != other["outputs"].get(file):
                tree.add(f"{file} differs")
        return tree
    if one["stage"] != other["stage"]:
        tree.add(f"another stage: {one['stage']} -> {other['stage']}")
    for key, a, b in _changed(one["params"], other["params"]):
        tree.add(f"parameter {key}: {a} -> {b}")
    if one["version"] != other["version"]:
        tree.add(f"stage version: {one['version']} -> {other['version']}")
    if one["code"] != other["code"]:
        modules = [(m, one["modules"].get(m), other["modules"].get(m)) for m in sorted(one["modules"].keys() | other["modules"].keys())]
        for module, a, b in modules:
            if a != b:
                tree.add(f"code: {module} " + ("changed" if a and b else "is new" if b else "is gone"))
    for a, b in zip(one["packages"], other["packages"]):
        if a != b:
            tree.add(f"package: {a} -> {b}")
    for name in sorted(one["inputs"].keys() | other["inputs"].keys()):
        a, b = one["inputs"].get(name), other["inputs"].get(name)
        if a is None or b is None:
            tree.add(f"input {name}: only {'the second' if a is None else 'the first'} has it")
        elif a["content"] != b["content"]:
            below = lineage.manifest_of(store, a, root), lineage.manifest_of(store, b, root)
            tree.add(_differ(*below, store, root, seen, f"input {name}: "))
    if one["content"] == other["content"]:
        tree.add("and yet the same bytes")
    return tree


def _changed(one: Any, other: Any, path: str = ""):
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted(one.keys() | other.keys()):
            yield from _changed(one.get(key), other.get(key), f"{path}.{key}" if path else key)
    elif one != other:
        yield path, json.dumps(one), json.dumps(other)


def pending(resolution: Resolution, target: Target) -> Tree:
    """What a run of the target would do, and why."""
    tree = Tree(resolution.summary())
    for path, node in resolution.closure.items():
        found = resolution.found[path]
        name = path.split("/", 2)[2]
        if path in resolution.compute:
            tree.add(f"compute {name}: {found.why}{_nearest(resolution, node) if found.why == 'not made yet' else ''}")
        elif path in resolution.linkable:
            tree.add(f"restore {name} ({found.state})")
        elif found.state != IN_PLACE:
            tree.add(f"leave {name}: nothing needs it ({found.why})")
    for file in sorted(resolution.behind()):
        tree.add(f"write {file}")
    return tree


def _nearest(resolution: Resolution, node) -> str:
    """The artifact of the same model and stage that differs least in its parameters, if there is one."""
    tail = node.path.rsplit("/", 2)[1:] if node.folder else [""]
    best: tuple[int, str] | None = None
    for path in (resolution.root / "results/store").glob(f"{node.model}-*/{'/'.join(tail)}/{manifest.NAME}".replace("//", "/")):
        found = manifest.read(path.parent)
        changes = [f"{key} {a} -> {b}" for key, a, b in _changed(found["params"], node.params)]
        if found["stage"] == node.stage and (best is None or len(changes) < best[0]):
            best = (
                len(changes),
                f"; {path.parent.relative_to(resolution.root / 'results/store')} has {', '.join(changes) or 'other inputs'}",
            )
    return best[1] if best else ""


def tree_of(artifact: Path, store: Store, root: Path, *, everything: bool) -> Tree:
    """What an artifact was made from, down to the data, each shown once; iterations before the last are counted in a line."""
    made = manifest.read(artifact)
    records = lineage.ancestry(store, artifact, root)
    places = {i["key"]: i["path"] for record in records.values() for i in record["manifest"]["inputs"].values()}
    places[made["key"]] = str(artifact.relative_to(root))
    info = {key: _info(root / path) for key, path in places.items()}
    shown: set[str] = set()

    def label(key: str, role: str) -> str:
        m, i = records[key]["manifest"], info[key]
        parts = [places[key].removeprefix("results/store/"), m["stage"], f"key {key[:12]}"]
        if "seed" in m["params"]:
            parts.append(f"seed {m['params']['seed']}")
        if "pin" in m["params"]:
            parts.append(f"pin {m['params']['pin'][:12]}")
        if i:
            parts.append(
                f"{i['finished'] - i['started']:.1f} s, {i['status']} {time.strftime('%Y-%m-%d %H:%M', time.localtime(i['finished']))}"
            )
        return f"{role}{'  '.join(parts)}"

    def grow(tree: Tree, key: str) -> None:
        for name, i in records[key]["manifest"]["inputs"].items():
            below = i["key"]
            if below in shown:
                tree.add(f"{name}: {i['path'].removeprefix('results/store/')} (above)")
                continue
            if not everything and _run(i["path"]) and _run(i["path"]) == _run(places[key]) and _number(i["path"]) < _number(places[key]):
                earlier = [
                    k for k, p in places.items() if _run(p) == _run(i["path"]) and _number(p) <= _number(i["path"]) and k not in shown
                ]
                seconds = sum(info[k]["finished"] - info[k]["started"] for k in earlier if info[k])
                shown.update(earlier)
                branch = tree.add(
                    f"{name}: iterations 1 to {_number(i['path'])}: {len(earlier)} artifacts, {seconds:.1f} s (--all shows them)"
                )
                first = min(earlier, key=lambda k: (_number(places[k]), list(records).index(k)))
                for other in earlier:
                    for n, j in records[other]["manifest"]["inputs"].items():
                        if j["key"] not in shown and _run(j["path"]) != _run(places[first]):
                            shown.add(j["key"])
                            grow(branch.add(label(j["key"], f"{n}: ")), j["key"])
                continue
            shown.add(below)
            grow(tree.add(label(below, f"{name}: ")), below)

    shown.add(made["key"])
    tree = Tree(label(made["key"], ""))
    grow(tree, made["key"])
    tree.add(f"packages: {', '.join(sorted({p for r in records.values() for p in r['manifest']['packages']}))}")
    return tree


def _run(path: str) -> str:
    """The folder of a run of iterations, or nothing."""
    parts = path.split("/")
    return "/".join(parts[:3]) if len(parts) == 5 else ""


def _number(path: str) -> int:
    return int(path.split("/")[3])


def _info(artifact: Path) -> dict[str, Any] | None:
    try:
        info = json.loads((artifact / "run_info.json").read_text())
        return info["computed"] if info.get("computed") else info
    except (FileNotFoundError, ValueError):
        return None
