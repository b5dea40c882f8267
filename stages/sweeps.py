"""Sweeps: one model of the graph, many times, with other options or seeds. Each point becomes a model of its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.config import Sweep
from stages.errors import UserError


@dataclass(frozen=True)
class Point:
    """One model of a sweep. `label` is its setting without the seed, for tables."""

    model: str
    label: str
    changes: dict[str, Any]


def points(name: str, sweep: Sweep) -> list[Point]:
    """Every variant with every combination of the grid and every seed, in the order given."""
    return list(_points(name, sweep))


def _points(name: str, sweep: Sweep) -> Iterator[Point]:
    for variant, options in (sweep.variants or {"": {}}).items():
        for values in itertools.product(*sweep.grid.values()):
            setting = dict(zip(sweep.grid, values))
            label = "_".join([*filter(None, [variant]), *(f"{key.split('.')[-1]}-{_word(value)}" for key, value in setting.items())])
            for seed in sweep.seeds or [None]:
                changes = {**options, **setting} | ({} if seed is None else {"seed": seed})
                parts = [name, *filter(None, [label]), *([] if seed is None else [f"seed-{seed}"])]
                yield Point("-".join(parts), label or sweep.model, changes)


def _word(value: Any) -> str:
    return str(value).replace(" ", "").replace("/", "-")


def expand(raw: dict[str, Any], sweeps: dict[str, Sweep]) -> dict[str, Any]:
    """The configuration with a model for every point. Raises UserError when a sweep's model is unknown or names collide."""
    models = dict(raw.get("models") or {})
    for name, sweep in sweeps.items():
        if sweep.model not in (raw.get("models") or {}):
            from stages.config_check import nearest

            raise UserError(f"config: sweeps.{name}.model: no model '{sweep.model}'{nearest(sweep.model, raw.get('models') or {})}")
        if name in models or name == "compare":
            raise UserError(f"config: sweeps.{name}: the name is taken; give the sweep another")
        for point in points(name, sweep):
            if point.model in models:
                raise UserError(f"config: sweeps.{name}: two points are called '{point.model}'; give them variants' names of their own")
            if not isinstance(raw["models"][sweep.model], dict):
                raise UserError(f"config: models.{sweep.model}: a mapping of options is wanted")
            made = copy.deepcopy(raw["models"][sweep.model])
            for key, value in point.changes.items():
                *path, last = key.split(".")
                place = made
                for part in path:
                    if not isinstance(place.get(part) or {}, dict):
                        raise UserError(f"config: sweeps.{name}: {key}: {part} holds {place[part]!r} and no options of its own")
                    place[part] = dict(place.get(part) or {})
                    place = place[part]
                place[last] = value
            models[point.model] = made
    return raw | {"models": models}
