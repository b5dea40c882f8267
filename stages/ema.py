"""A moving average of a model's weights over PPO iterations, tensor by tensor (runs where torch is loaded)."""

from __future__ import annotations

import shutil
from pathlib import Path


def average(*, before: str, now: str, out: str, decay: float) -> None:
    """Write decay * before + (1 - decay) * now as a model folder, in float32: in bfloat16 small steps would round away."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(now, out, ignore=shutil.ignore_patterns("*.safetensors"))
    earlier = {}
    for path in sorted(Path(before).glob("*.safetensors")):  # an imported model may be cut into other files than ours
        with safe_open(str(path), "pt") as file:
            earlier |= dict.fromkeys(file.keys(), path)
    for path in sorted(Path(now).glob("*.safetensors")):
        found = {}
        with safe_open(str(path), "pt") as new:
            for name in new.keys():  # noqa: SIM118 - not a dict
                with safe_open(str(earlier[name]), "pt") as old:
                    found[name] = torch.lerp(new.get_tensor(name).float(), old.get_tensor(name).float(), decay)
            save_file(found, str(Path(out) / path.name), metadata=new.metadata())
