"""A merged configuration checked whole: values, keys and references, one line for each fault, with the nearest right name."""

from __future__ import annotations

import difflib
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from stages import sweeps
from stages.config import Config, Sweep
from stages.config_data import Data
from stages.config_models import POLICIES, STAGES, Import, Pretrain
from stages.errors import UserError
from stages.sources import is_model, is_service

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")


def nearest(word: str, words) -> str:
    """`; did you mean X?` for the nearest of words, or an empty string."""
    match = difflib.get_close_matches(str(word), [str(w) for w in words], n=1, cutoff=0.5)
    return f"; did you mean '{match[0]}'?" if match else ""


def _section_at(location: tuple) -> type[BaseModel] | None:
    """The section class that a pydantic error location (without its last part) points into."""
    section: Any = Config
    parts = list(location)
    while parts:
        part = parts.pop(0)
        if section is Config and part == "data":
            parts, section = parts[1:], Data
        elif section is Config and part == "models":
            parts = parts[1:]
            section = STAGES.get(parts.pop(0)) if parts else None
        elif isinstance(section, type) and issubclass(section, BaseModel):
            field = next((f for n, f in section.model_fields.items() if part in (n, f.alias)), None)
            section = field.annotation if field else None
        else:
            return None
    return section if isinstance(section, type) and issubclass(section, BaseModel) else None


def _say(error: dict) -> str:
    location = list(error["loc"])
    shown = [str(p) for i, p in enumerate(location) if not (i == 2 and location[0] == "models" and p in STAGES)]
    path = ".".join(shown) or "configuration"
    kind, got = error["type"], error.get("input")
    if kind == "extra_forbidden":
        section = _section_at(tuple(location[:-1]))
        names = [f.alias or n for n, f in section.model_fields.items()] if section else []
        return f"{path}: unknown key{nearest(location[-1], names)}"
    if kind == "missing":
        return f"{path}: missing; add it (config/README.md explains each key)"
    if kind == "union_tag_invalid":
        tag = error["ctx"]["tag"]
        return f"{path}.stage: unknown stage '{tag}'{nearest(tag, STAGES)} (known: {', '.join(STAGES)})"
    message = error["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return f"{path}: {message}" if shown else message
    return f"{path}: {message[0].lower()}{message[1:]}, got {got!r}"


def load(raw: dict[str, Any]) -> Config:
    """Validate a merged configuration (as Snakemake hands it over) and its references.

    raw may hold `set`: "a.b=1,c.d=2", applied last; a leading model name may stand without `models.`.
    Raises UserError with one line per fault, naming the key and the nearest right name.
    """
    raw = dict(raw)
    for assignment in filter(None, str(raw.pop("set", "") or "").split(",")):
        _assign(raw, assignment)
    try:
        found = {name: Sweep.model_validate(sweep) for name, sweep in _mapping(raw, "sweeps").items()}
    except ValidationError as error:
        raise UserError("\n".join(f"config: sweeps: {_say(e)}" for e in error.errors())) from None
    raw = sweeps.expand(raw | {"models": {name: _imported(model) for name, model in _mapping(raw, "models").items()}}, found)
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        raise UserError("\n".join(f"config: {_say(e)}" for e in error.errors())) from None
    faults = list(_broken_references(config))
    if faults:
        raise UserError("\n".join(f"config: {fault}" for fault in faults))
    return config


def _imported(model: Any) -> Any:
    """`base: {from: <hub name>}` over the default's pretrained base: merging files leaves both, and `from` is what is meant."""
    if not isinstance(model, dict) or "from" not in model or model.get("stage") not in ("pretrain", "import"):
        return model
    left = Pretrain.model_fields.keys() - {field.alias or name for name, field in Import.model_fields.items()}
    return {key: value for key, value in model.items() if key not in left | {"stage"}}


def _mapping(raw: dict[str, Any], key: str) -> dict[str, Any]:
    found = raw.get(key) or {}
    if not isinstance(found, dict):
        raise UserError(f"config: {key}: a mapping of names is wanted")
    return found


def _assign(raw: dict, assignment: str) -> None:
    key, equals, value = assignment.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"config: set: '{assignment}' is not of the form section.key=value")
    if parts[0] in _mapping(raw, "models"):
        parts = ["models", *parts]
    place, path = raw, []
    for part in parts[:-1]:
        if not isinstance(place.get(part) or {}, dict):
            raise UserError(f"config: set: '{assignment}': {'.'.join([*path, part])} holds {place[part]!r} and no options of its own")
        copied = dict(place.get(part) or {})
        place[part] = copied
        place = copied
        path.append(part)
    place[parts[-1]] = None if value == "null" else value


def _broken_references(config: Config):
    """Every name that a model or the evaluation uses must exist and be of the right kind; the graph has no cycle."""
    policies = POLICIES

    def model(path, name, stages):
        found = config.models.get(name)
        if found is None:
            return f"{path}: no model '{name}'{nearest(name, config.models)}"
        if found.stage not in stages:
            return f"{path}: model '{name}' is a {found.stage}; wanted one of {', '.join(stages)}"

    def data(path, name, *kinds):
        found = config.data.get(name)
        if found is None:
            return f"{path}: no data set '{name}'{nearest(name, config.data)}"
        if found.kind not in kinds:
            return f"{path}: data set '{name}' holds {found.kind}; wanted {' or '.join(kinds)}"

    faults = [f"{kind}.{name}: a name has letters, digits, '.', '_' and '-' only"
              for kind in ("data", "models", "sweeps") for name in getattr(config, kind) if not _NAME.match(name)]  # fmt: skip
    for at, rewards in [
        ("evaluation", config.evaluation.reward),
        *((f"models.{n}", getattr(m, "reward", {})) for n, m in config.models.items()),
    ]:
        for source in rewards if isinstance(rewards, dict) else ():
            if is_service(source) and "@" in source.split("/")[2]:
                faults.append(f"{at}.reward: no password in an address; write ${{NAME}} for an environment variable that holds a key")
    if "compare" in config.models:
        faults.append("models.compare: this name is the target of all models together; take another")
    for name, section in config.data.items():
        faults += [data(f"data.{name}.mixture", part, section.kind) for part in section.mixture]
        if any(config.data[part].mixture for part in section.mixture if part in config.data):
            faults.append(f"data.{name}.mixture: of mixtures; name the data sets themselves")
    for name, m in config.models.items():
        at = f"models.{name}"
        if m.stage == "pretrain":
            faults.append(data(f"{at}.data", m.data, "texts"))
            if m.demonstrations:
                faults.append(data(f"{at}.demonstrations", m.demonstrations, "demonstrations"))
        elif m.stage == "sft":
            faults += [model(f"{at}.from", m.base, policies), data(f"{at}.data", m.data, "demonstrations")]
        elif m.stage == "reward_model":
            faults += [
                model(f"{at}.from", m.base, (*policies, "reward_model")),
                data(f"{at}.data", m.data, "preferences"),
                data(f"{at}.heldout", m.heldout, "preferences"),
            ]
        elif m.stage in ("dpo", "kto"):
            kinds = ("preferences",) if m.stage == "dpo" else ("preferences", "rated")
            faults += [model(f"{at}.from", m.base, policies), data(f"{at}.data", m.data, *kinds)]
        elif m.stage == "conditional_sft":
            faults += [
                model(f"{at}.from", m.base, policies),
                model(f"{at}.reward", m.reward, ("reward_model",)),
                data(f"{at}.data", m.data, "demonstrations"),
            ]
        elif m.stage in ("ppo", "rejection_sampling", "iterative_dpo"):
            faults += [
                model(f"{at}.from", m.base, policies),
                *(model(f"{at}.reward", source, ("reward_model",)) for source in m.reward if is_model(source)),
                data(f"{at}.prompts", m.prompts, "prompts"),
            ]
            if getattr(m, "ptx_data", None):
                faults.append(data(f"{at}.ptx_data", m.ptx_data, "demonstrations", "texts"))
    e = config.evaluation
    faults += [
        model("evaluation.baseline", e.baseline, policies),
        *(model("evaluation.reward", source, ("reward_model",)) for source in e.reward if is_model(source)),
        data("evaluation.prompts", e.prompts, "prompts"),
    ]
    yield from filter(None, faults)
    for name in config.models:
        cycle = _cycle(config, [name])
        if cycle:
            yield f"models.{name}.from: the graph has a cycle: {' -> '.join(cycle)}"
            return


def _cycle(config: Config, path: list[str]) -> list[str]:
    """The way from the first model of a path back to one on it, over what models are made from, or nothing."""
    model = config.models[path[-1]]
    rewards = getattr(model, "reward", ())
    for other in [getattr(model, "base", None), *([rewards] if isinstance(rewards, str) else rewards)]:
        if other in path:
            return [*path, other]
        if other in config.models and (found := _cycle(config, [*path, other])):
            return found
    return []
