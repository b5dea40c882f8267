"""Resumable state of a training: weights, optimizer, position and metrics in one folder, for any number of ranks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def latest(folder: str | None) -> Path | None:
    """The newest whole state below a folder, if there is one."""
    return max(Path(folder).glob("step-*"), default=None) if folder else None


def step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def reached(folder: str) -> int | None:
    """The last step that was taken, or how many prompts were begun, saved or not; None before the first."""
    path = Path(folder) / "reached"
    return int(path.read_text()) if path.exists() else None


def mark(folder: str, step: int) -> None:
    """Note that a step was taken (or so many prompts begun), so that a resumed run can say how much is done again."""
    path = Path(folder) / "reached"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".reached-{os.getpid()}")
    temporary.write_text(str(step))
    temporary.replace(path)


def save(engine, folder: Path, progress: dict[str, Any], *, precision: str) -> None:
    """Write `step-<n>/`, whole or not at all; the state before it goes only then. Collective."""
    import torch

    from stages.cluster import zero

    target, temporary = folder / f"step-{progress['step']:08d}", folder / f".step-{os.environ['MASTER_PORT']}"  # the group's own
    first = torch.distributed.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    zero.write_parameters(engine, temporary / "weights", master=precision != "float32")
    zero.write_optimizer(engine, temporary / "optimizer", masters=False)
    torch.distributed.barrier()
    if first:
        (temporary / "progress.json").write_text(json.dumps(progress))
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        for old in folder.glob("step-*"):
            if old != target:
                shutil.rmtree(old)
    torch.distributed.barrier()


def copy_into(network, weights: Mapping) -> None:
    """Saved weights into a network that is not trained yet, sharded or not."""
    import deepspeed
    import torch

    with torch.no_grad():
        for name, parameter in network.inner.named_parameters():
            if hasattr(parameter, "ds_id"):
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if parameter.numel():
                        parameter.copy_(weights[name].to(parameter.dtype))
            else:
                parameter.copy_(weights[name].to(parameter.dtype))
