"""A moving average of a model's weights over PPO iterations, tensor by tensor (runs where torch is loaded)."""

from __future__ import annotations

import shutil
from pathlib import Path


def average(*, before: str, now: str, out: str, decay: float) -> None:
    """Write decay * before + (1 - decay) * now as a model folder; arithmetic in float32, stored as `now` is."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(now, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in sorted(Path(now).glob("*.safetensors")):
        found = {}
        with safe_open(str(path), "pt") as new, safe_open(str(Path(before) / path.name), "pt") as old:
            for name in new.keys():  # noqa: SIM118 - not a dict
                tensor = new.get_tensor(name)
                mixed = torch.lerp(tensor.float(), old.get_tensor(name).float(), decay)
                found[name] = mixed.to(tensor.dtype)
            save_file(found, str(Path(out) / path.name), metadata=new.metadata())
