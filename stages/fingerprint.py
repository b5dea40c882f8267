"""Fingerprints of our own code: what a stage's import closure inside `stages/` means, comments and docstrings aside."""

from __future__ import annotations

import ast
import hashlib
import re
import threading
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PLUMBING = {"stages.errors", "stages.manifest", "stages.plan", "stages.runner", "stages.cluster.actors", "stages.cluster.placement"}
"""Modules that carry results about and make none: whatever is edited in them, or in what they import, no number changes."""
_PARSING = threading.Lock()
"""CPython 3.11's parser counts its depth for all threads together: two at once end in a SystemError."""
_REFERENCE = re.compile(r"^stages(\.\w+)+:\w+$")


def _file(module: str) -> Path | None:
    base = ROOT.parent.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


class _WithoutDocstrings(ast.NodeTransformer):
    def _strip(self, node):
        self.generic_visit(node)
        body = node.body
        node.body = [
            s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) and isinstance(s.value.value, str))
        ] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _strip


@cache
def _parsed(module: str) -> tuple[str, frozenset[str]]:
    """(hash of the normalised syntax tree, modules of ours that it imports or names as "stages.x.y:name")."""
    with _PARSING:
        return _parse(module)


def _parse(module: str) -> tuple[str, frozenset[str]]:
    tree = ast.parse(_file(module).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            raise ValueError(f"{module}: relative import; write it in full, so that fingerprints see it")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _REFERENCE.match(node.value):
            found.add(node.value.partition(":")[0])
    ours = frozenset(m for m in found if m.split(".")[0] == "stages" and _file(m))
    return hashlib.sha256(ast.dump(_WithoutDocstrings().visit(tree)).encode()).hexdigest(), ours


def modules(*roots: str) -> dict[str, str]:
    """Every module of ours that the roots reach, themselves included, with the hash of what its code means."""
    reached, waiting = {}, list(roots)
    while waiting:
        name = waiting.pop()
        if name not in reached and name not in PLUMBING:
            reached[name], imports = _parsed(name)
            waiting += imports
    return dict(sorted(reached.items()))


@cache
def fingerprint(*roots: str) -> str:
    """Hash over the import closure of the roots; 16 hexadecimal digits."""
    return hashlib.sha256(repr(modules(*roots)).encode()).hexdigest()[:16]


def code_id() -> str:
    """Hash of all our source files as they are; warm processes that hold other code are not used."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in sorted(ROOT.rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
