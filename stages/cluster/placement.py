"""Which GPU a process gets: rank i of every trainer group, and the engines on it, share GPU i as the configuration says."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from stages.errors import UserError

_NAME = "rlhf-stages"


def gpus() -> int:
    return int(ray.cluster_resources().get("GPU", 0))


def placement(hardware: dict[str, Any], index: int, *, engine: bool = False) -> dict[str, Any]:
    """Ray options for rank `index` of a group, or for engine `index`. Nothing is reserved on a cluster without GPUs.

    Raises UserError, saying what is wanted and what is free, instead of waiting for ever.
    """
    if not gpus():
        return {"num_cpus": 0}
    engines = hardware["engines"]
    groups = len(hardware["colocate"])
    if engine and not engines["colocate"]:
        return {"num_cpus": 0, "num_gpus": engines["tensor_parallel"]}
    sharing = groups + (1 if engines["colocate"] else 0)
    if engine and engines["tensor_parallel"] > 1:
        raise UserError("hardware.engines: tensor_parallel above 1 needs engines of their own; set hardware.engines.colocate: false")
    return {
        "num_cpus": 0,
        "num_gpus": 1.0 / sharing,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(_reserved(hardware["ranks"]), placement_group_bundle_index=index),
    }


def _reserved(ranks: int) -> PlacementGroup:
    """One bundle with one whole GPU for each rank, kept for as long as the cluster lives."""
    name = f"{_NAME}-{ranks}"
    try:
        return get_placement_group(name)
    except ValueError:
        pass
    free = int(ray.available_resources().get("GPU", 0))
    if free < ranks:
        raise UserError(f"hardware.ranks: {ranks} GPUs are wanted, {free} of {gpus()} are free; see `rlhf cluster status`, ask for less")
    group = placement_group([{"GPU": 1}] * ranks, strategy="PACK", name=name, lifetime="detached")
    ray.get(group.ready(), timeout=60)
    return group
