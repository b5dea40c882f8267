"""Run keys: the identity of a result. What was asked for, by which code, with which packages, from which contents."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from stages import plan
from stages.errors import UserError


@cache
def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    raise UserError(f"package {package} is not installed; run `make env`")


def packages(stage: str) -> list[str]:
    """`name version` of each package that a stage's numbers depend on."""
    return [_version(p) for p in plan.STAGES[stage].packages]


def run_key(job: Mapping[str, Any], contents: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """(key of 32 hexadecimal digits, its parts) for a job whose inputs have these contents."""
    parts = {"plan": job["plan"], "code": job["code"], "packages": packages(job["stage"]), "inputs": dict(contents)}
    return hashlib.sha256(plan.canonical(parts).encode()).hexdigest()[:32], parts
