"""One file from which a run can be made again elsewhere, and the comparison with what comes out."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages import lineage, manifest, plan
from stages.errors import UserError
from stages.fingerprint import ROOT
from stages.store import Store

REPORT = Path("results/report")


def freeze(target: str, store: Store, root: Path) -> dict[str, Any]:
    """Configuration, data pins, code revision, lock and the key and content of every artifact of a finished target.

    Raises UserError when the target is not finished.
    """
    path = root / REPORT / f"{target}.json"
    try:
        job = json.loads(path.read_text())["job"]
    except FileNotFoundError:
        known = sorted(p.stem for p in (root / REPORT).glob("*.json") if p.stem != "summary")
        raise UserError(f"{target}: not finished here; finished: {', '.join(known) or 'nothing'}") from None
    artifacts: dict[str, dict[str, str]] = {}
    data: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for artifact in [*job["models"].values(), *job["evaluations"].values()]:
        if not (root / artifact / manifest.NAME).exists():
            continue  # an ancestor that nothing needed here; what was made from it names it
        made = manifest.read(root / artifact)
        artifacts[artifact] = {"key": made["key"], "content": made["content"]}
        for key, record in lineage.ancestry(store, root / artifact, root).items():
            if key in seen:
                continue
            seen.add(key)
            m = record["manifest"]
            for i in m["inputs"].values():
                artifacts[i["path"]] = {"key": i["key"], "content": i["content"]}
            if m["stage"] == "data":
                data[m["model"]] = {"rows": m["facts"].get("rows"), "content": m["content"]} | (
                    {"pin": m["params"]["pin"]} if "pin" in m["params"] else {}
                )
    return {
        "target": target,
        "code": _revision() | {"lock": _lock()},
        "data": dict(sorted(data.items())),
        "config": job["config"],
        "artifacts": dict(sorted(artifacts.items())),
    }


def _revision() -> dict[str, Any]:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return {
        "revision": git("rev-parse", "HEAD") or "not in git",
        "changed_files": len(git("status", "--porcelain", "--", ".").splitlines()),
    }


def _lock() -> str:
    kind = Path(sys.prefix, ".kind")
    lock = ROOT.parent / "envs" / f"{kind.read_text().strip() if kind.exists() else 'cpu'}.txt"
    return f"{lock.name} {hashlib.sha256(lock.read_bytes()).hexdigest()}"


def configuration(frozen: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    """The frozen configuration on this machine's hardware and cluster."""
    return frozen["config"] | {name: local[name] for name in ("hardware", "cluster") if name in local}


def notes(frozen: dict[str, Any]) -> list[str]:
    """What is not as it was, before anything runs."""
    now = _revision() | {"lock": _lock()}
    return [
        f"{name}: {frozen['code'][name]} when frozen, {now[name]} here"
        for name in ("revision", "lock")
        if frozen["code"][name] != now[name]
    ]


def compare(frozen: dict[str, Any], planned: plan.Plan, store: Store, root: Path) -> list[str]:
    """A line for every artifact that has not the key or the bytes it had."""
    here: dict[str, dict[str, Any]] = {}
    faults = []
    for path in frozen["artifacts"]:
        if (root / path / manifest.NAME).exists():
            made = here[path] = manifest.read(root / path)
            waiting = list(made["inputs"].values())
            while waiting:
                i = waiting.pop()
                if i["path"] not in here:
                    here[i["path"]] = i
                    record = store.record(i["key"])
                    waiting += record["manifest"]["inputs"].values() if record else ()
    for path, expected in frozen["artifacts"].items():
        if path not in planned.nodes:
            faults.append(f"{path}: not part of this configuration any more (its data, or a stage's version, changed)")
        elif path not in here:
            faults.append(f"{path}: not made")
        elif here[path]["key"] != expected["key"]:
            same = here[path]["content"] == expected["content"]
            faults.append(f"{path}: another key (code, packages or inputs changed){', the same bytes' if same else ', other bytes'}")
        elif here[path]["content"] != expected["content"]:
            faults.append(f"{path}: the same key, other bytes")
    return faults
