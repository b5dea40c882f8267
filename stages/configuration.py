"""The merged configuration outside Snakemake: the same files, the same order, the same rules of merging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.errors import UserError

DEFAULT = Path(__file__).resolve().parents[1] / "config" / "config.yaml"


def merged(files: list[Path], assignments: str | None = None) -> dict[str, Any]:
    """config/config.yaml, over it the files in their order, and `set=` assignments; not validated yet."""
    import yaml
    from snakemake.utils import update_config

    raw: dict[str, Any] = {}
    for path in [DEFAULT, *files]:
        try:
            found = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            raise UserError(f"{path}: no such configuration file") from None
        except yaml.YAMLError as error:
            raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
        if not isinstance(found, dict):
            raise UserError(f"{path}: not a configuration; keys are wanted at the top")
        update_config(raw, found)
    return raw | ({"set": assignments} if assignments else {})
