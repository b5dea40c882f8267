"""The steps of make_env.sh that look inside an environment. Run by that environment's own Python, before anything is installed."""

import importlib
import importlib.metadata
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
AGAIN = "remove .venv and run make env again"
KEPT = {"pip", "setuptools", "torch", "rlhf-stages"}
CHECKED = (
    "torch",
    "vllm",
    "ray",
    "deepspeed",
    "transformers",
    "datasets",
    "pyarrow",
    "snakemake",
    "dvc",
    "dvc_data",
    "accelerate",
    "pydantic",
    "typer",
    "rich",
    "matplotlib",
    "jinja2",
    "scipy",
    "numpy",
    "safetensors",
    "tokenizers",
    "psutil",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    pins = (line.split("==") for line in sys.stdin.read().split("\n") if "==" in line)
    return {normal(name): version.strip() for name, version in pins}


def installed() -> dict[str, str]:
    return {normal(found.metadata["Name"]): found.version for found in importlib.metadata.distributions(path=[str(SITE)])}


def repair() -> None:
    """Remove what a killed pip left: it writes RECORD last, and takes a package without one for installed."""
    for info in SITE.glob("*.dist-info"):
        if not (info / "RECORD").exists():
            shutil.rmtree(info)
    for leftover in SITE.glob("~*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def extra() -> str:
    return " ".join(sorted(set(installed()) - set(locked()) - KEPT))


def torch_kind() -> str:
    text = (SITE / "torch/version.py").read_text()
    return "cpu" if re.search(r"^cuda\b.*= None$", text, re.MULTILINE) else "cuda"


def has_op() -> bool:
    return any(SITE.glob("deepspeed/ops/comm/deepspeed_shm_comm_op.*.so"))


def check(kind: str) -> None:
    have = installed()
    for name, version in locked().items():
        if name not in have:
            sys.exit(f"missing: {name}=={version} is in the lock but not installed: {AGAIN}")
        if have[name] != version:
            sys.exit(f"missing: the lock wants {name}=={version}, but {have[name]} is installed: {AGAIN}")
    if torch_kind() != kind:
        sys.exit(f"missing: a {kind} build of torch; the one installed is for {torch_kind()}")
    for module in [*CHECKED, *(["deepspeed.ops.comm.deepspeed_shm_comm_op"] if kind == "cpu" else [])]:
        try:
            importlib.import_module(module)
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            sys.exit(f"missing: {module} does not import: {reason} ({AGAIN})")


def move(old: str, new: str) -> None:
    """Let the scripts in bin/ name the new place. Files are replaced, not written through: they may be hard links."""
    python = f"{new}/bin/python"
    plain = f"#!{python}\n"
    # What pip writes where a path is too long for the kernel or has a space in it.
    line = plain if len(plain) <= 127 and " " not in plain else f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n"
    shebang = re.compile(rf"\A(#!{re.escape(old)}/bin/python[\d.]*\n|#!/bin/sh\n'''exec' \S?{re.escape(old)}/bin/python[^\n]*\n' '''\n)")
    for script in Path(new, "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        try:
            text = script.read_text()
        except UnicodeDecodeError:
            continue
        moved = shebang.sub(lambda _: line, text)
        if script.name.lower().startswith("activate"):
            moved = moved.replace(old, new)
        if moved != text:
            copy = script.with_name(script.name + ".new")
            copy.write_text(moved)
            shutil.copymode(script, copy)
            copy.replace(script)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    commands = {"repair": repair, "extra": extra, "torch-kind": torch_kind, "has-op": has_op, "check": check, "move": move}
    answer = commands[command](*arguments)
    if isinstance(answer, bool):
        sys.exit(not answer)
    if answer:
        print(answer)
