"""What every section of the configuration shares: no unknown keys, explained fields, sources of reward."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def _weights(value: Any) -> Any:
    """One reward source, a list of them, or weights: always weights."""
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, (list, tuple)):
        return dict.fromkeys(value, 1.0)
    return value


Rewards = Annotated[dict[str, float], BeforeValidator(_weights), Field(min_length=1)]
"""Sources of reward and their weights: reward models of the graph, `file.py:function`, http(s)://... services."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def changed(self, *names: str) -> list[str]:
        """Those of the options that are not at their defaults."""
        return [n for n in names if getattr(self, n) != type(self).model_fields[n].get_default(call_default_factory=True)]
