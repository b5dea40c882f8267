"""config/README.md and the JSON schema, made from the typed configuration; a test fails when they are out of step."""

from __future__ import annotations

import json
import types
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from stages import config, config_data, config_models
from stages.manifest import write_text
from stages.plan import canonical

README, SCHEMA = Path("config/README.md"), Path("workflow/schemas/config.json")

_INTRO = """# Configuration

`config/config.yaml` is the default: the embedded world. Change one number on the command line, several in a file of your own:

    snakemake --cores all ppo_final --config set="ppo.kl_coef=0.05,ppo.iterations=10"
    snakemake --cores all ppo_final --configfile my.yaml        # merged over the default; lists and numbers replace
    snakemake --cores all ppo_final --configfile my.yaml --replace-workflow-config     # instead of the default

Every model `m` is a target `m_final`; adding a model to the graph adds a target, and what it shares with others is made once.
What is under `hardware` and `cluster`, `save_every`, `save_minutes`, `keep_optimizers` and `iterations` is not part of an
artifact's identity. A wrong key, type or reference ends the run before any work, with one line that names it. This page is made by
`rlhf config --write`.
"""


def readme() -> str:
    """One table per section."""
    parts = [_INTRO, _table("Top level", config.Config)]
    parts += [_table("data.NAME", config_data.Data)]
    for stage, model in config_models.STAGES.items():
        parts.append(_table(f"models.NAME, stage: {stage}", model))
    parts += [_table(f"{name}", section) for name, section in _NESTED]
    return "\n".join(parts)


_NESTED = [
    ("architecture", config_models.Architecture),
    ("optimizer (also actor and critic of ppo)", config_models.Optimizer),
    ("sampling", config_models.Sampling),
    ("evaluation", config.Evaluation),
    ("sweeps.NAME", config.Sweep),
    ("hardware", config.Hardware),
    ("hardware.engines", config.Engines),
    ("cluster", config.Cluster),
]


def schema() -> str:
    return json.dumps(config.Config.model_json_schema(by_alias=True), indent=1, sort_keys=True) + "\n"


def write(root: Path) -> None:
    write_text(root / README, readme())
    write_text(root / SCHEMA, schema())


def _table(title: str, section: type[BaseModel]) -> str:
    lines = [f"## {title}\n", " ".join((section.__doc__ or "").split()), "", "| key | type | default | what it is |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        default = "required" if field.is_required() else _default(field)
        lines.append(f"| `{field.alias or name}` | {_type(field.annotation)} | {default} | {' '.join((field.description or '').split())} |")
    return "\n".join(lines) + "\n"


def _default(field) -> str:
    value = field.default
    if value is PydanticUndefined:
        return ""
    if isinstance(value, BaseModel):
        changed = value.model_dump(exclude_defaults=True)
        return f"`{canonical(changed)}`" if changed else "see below"
    return "none" if value is None else f"`{value}`" if isinstance(value, str) else f"`{canonical(value)}`"


def _type(annotation) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type(args[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{a}`" for a in args)
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(_type(a) for a in args if a is not type(None)) + (" or none" if type(None) in args else "")
    if origin in (list, tuple, dict):
        return f"{origin.__name__} of {_type(args[-1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return getattr(annotation, "__name__", str(annotation))
