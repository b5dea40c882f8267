"""Which GPU a process gets: rank i of every trainer group, and the engines on it, share GPU i as the configuration says."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stages.errors import UserError

_NAME = "rlhf-stages"
_SHARE = 0.2
"""Of a GPU, for each process on it: four trainer groups and an engine are the most that share one, whatever was there before."""
_RELEASE_S = 10.0


def gpus() -> int:
    """GPUs of the cluster that our torch can use. Ray counts all that the machines have."""
    return int(ray.cluster_resources().get("GPU", 0)) if _made_for_cuda() else 0


@functools.cache
def _made_for_cuda() -> bool:
    """Whether torch is a CUDA build, without importing it: the dispatcher asks."""
    spec = importlib.util.find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    return re.search(r"^cuda\b[^=]*= *['\"]", text, re.MULTILINE) is not None


def placement(hardware: dict[str, Any], index: int, code_id: str, *, engine: bool = False) -> dict[str, Any]:
    """Ray options for rank `index` of a group, or for engine `index`. Nothing is reserved on a cluster without GPUs.

    Raises UserError, saying what is wanted and what there is, instead of waiting for ever.
    """
    if not (there := gpus()):
        return {"num_cpus": 0}
    engines, ranks = hardware["engines"], hardware["ranks"]
    check(engines, ranks, there)
    if engine and not engines["colocate"]:
        return {"num_cpus": 0, "num_gpus": engines["tensor_parallel"]}
    strategy = PlacementGroupSchedulingStrategy(_reserved(ranks, code_id), placement_group_bundle_index=index)
    return {"num_cpus": 0, "num_gpus": _SHARE, "scheduling_strategy": strategy}


def check(engines: dict[str, Any], ranks: int, there: int) -> None:
    """Raises UserError when ranks and engines cannot have what they want of the GPUs that are `there`."""
    if engines["colocate"] and engines["tensor_parallel"] > 1:
        raise UserError("hardware.engines: tensor_parallel above 1 needs engines of their own; set hardware.engines.colocate: false")
    if engines["colocate"] and engines["count"] > ranks:
        raise UserError(
            f"hardware.engines.count: {engines['count']} engines share the GPUs of {ranks} ranks, one each at most; "
            "ask for fewer, or set hardware.engines.colocate: false"
        )
    wanted = ranks + (0 if engines["colocate"] else engines["count"] * engines["tensor_parallel"])
    if wanted > there:
        raise UserError(f"hardware: ranks and engines want {wanted} GPUs, the cluster has {there}; set hardware.ranks or engines lower")


def _reserved(ranks: int, code_id: str) -> PlacementGroup:
    """One bundle with one whole GPU for each rank, kept until this code's processes are ended or another number is wanted."""
    name = f"{_NAME}-{code_id[:12]}-{ranks}"
    try:
        return get_placement_group(name)
    except ValueError:
        pass
    release(code_id)
    limit = time.monotonic() + _RELEASE_S
    while (free := int(ray.available_resources().get("GPU", 0))) < ranks and time.monotonic() < limit:
        time.sleep(0.2)  # what was released comes back a little later
    if free < ranks:
        raise UserError(f"hardware.ranks: {ranks} GPUs are wanted, {free} of {gpus()} are free; see `rlhf cluster status`, ask for less")
    group = placement_group([{"GPU": 1}] * ranks, strategy="PACK", name=name, lifetime="detached")
    ray.get(group.ready(), timeout=60)
    return group


def release(code_id: str) -> None:
    """Give back the GPUs that were reserved for this code; what runs on them ends."""
    for info in placement_group_table().values():
        if info["name"].startswith(f"{_NAME}-{code_id[:12]}-") and info["state"] != "REMOVED":
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(info["name"]))
