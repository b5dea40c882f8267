"""The data sets of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from stages.config_base import Section
from stages.forms import FORMS


class Data(Section):
    """One data set. It becomes an Arrow file that every model naming it shares."""

    kind: Literal["texts", "demonstrations", "preferences", "rated", "prompts"]
    """What a row is: a plain text; a prompt and its response; a prompt with a chosen and a rejected response; a prompt
    with a response and a label (true: desirable); a prompt."""
    source: str = "synthetic"
    """`synthetic` (the embedded world), a file (.jsonl, .json, .csv, .parquet, .arrow; .gz too), a folder that `datasets` saved,
    or `hf:NAME` for a hub data set."""
    split: str = "train"
    """Split of a hub data set; of the embedded world: `train` or `eval` (their instructions are disjoint)."""
    subset: str | None = None
    """Configuration of a hub data set that has several."""
    revision: str | None = None
    """Revision of a hub data set; pin it, since a name alone can change under you."""
    columns: dict[str, str] = {}
    """Our field -> the source's column where they differ, a path (`instances.0.output`) or a template (`{instruction}\\n{input}`).
    Fields: text; prompt, response; messages (role/content, or from/value); chosen, rejected (texts, conversations, or HH-style
    texts that share their beginning); answers, scores (K answers, best first or scored); label; reference; id."""
    rows: PositiveInt | None = None
    """How many rows: made (synthetic), or taken from the front (others; none means all)."""
    sample: bool = False
    """Draw `rows` by the seed instead of taking the first ones."""
    mixture: dict[str, PositiveFloat] = {}
    """Other data sets of the same kind -> weights: `rows` of them in these shares (none: as many as the smallest allows)."""
    seed: int = 0
    """Of the generator (synthetic), of `sample` and of a mixture."""
    noise: NonNegativeFloat = 0.1
    """Temperature of the embedded world's Bradley-Terry judge, in units of the gold reward; 0: it is never wrong."""

    @model_validator(mode="after")
    def _one_source(self):
        if self.mixture and self.changed("source", "columns", "split", "revision", "sample"):
            raise ValueError("mixture: the rows come from other data sets; take source and its options out")
        if self.sample and not self.rows:
            raise ValueError("sample: says how `rows` are drawn; give rows too")
        synthetic, hub = self.source == "synthetic" and not self.mixture, self.source.startswith("hf:")
        unread = self.changed("columns", "sample", "subset", "revision") if synthetic else self.changed("noise")
        if not hub and not synthetic:
            unread += self.changed("subset", "revision")
        if unread:
            raise ValueError(f"{unread[0]}: not read with source {self.source}; take it out")
        known = {field for form in FORMS[self.kind] for field in (*form[0], *form[1])} | {"id"}
        strange = sorted(self.columns.keys() - known)
        if strange:
            raise ValueError(f"columns.{strange[0]}: no field of {self.kind}; there are {', '.join(sorted(known))}")
        return self
