"""DeepSpeed ZeRO engines made by Accelerate, and their full parameters and optimizer state, whatever the sharding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from stages.cluster import shards

_MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master/"
"""Before the names of float32 masters in an optimizer's state."""


def configuration(*, stage: int, world: int, precision: str, max_grad_norm: float, offload: bool) -> dict:
    """The DeepSpeed configuration. The trainer itself divides losses and says where steps end.

    One rank has nobody to share gradients and moments with: it takes stage 0 for 1 and 2, and saves their flat copies.
    """
    if world == 1 and stage < 3 and precision == "float32" and not offload:
        stage = 0
    zero = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm if stage else 0.0,  # of stage 0: see `step`
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bfloat16"},
        "steps_per_print": 10**9,
    }


def partitioned_loading(config: dict):
    """Under ZeRO-3, Hugging Face models shard while they load if this object is alive; else None, and they do not."""
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # Accelerate leaves the one of the engine before
    return HfDeepSpeedConfig(config) if config["zero_optimization"]["stage"] == 3 else None


def make_engine(network: nn.Module, config: dict, optimizer: torch.optim.Optimizer | None):
    """A DeepSpeed engine around the network, for training or, without an optimizer, sharded inference."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from deepspeed import DeepSpeedEngine

    AcceleratorState._reset_state()  # one plugin per engine; several engines live in one process
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    engine = accelerator.prepare(network, optimizer)[0] if optimizer else accelerator.prepare(network)
    if not isinstance(engine, DeepSpeedEngine) or engine.zero_optimization_stage() != config["zero_optimization"]["stage"]:
        raise RuntimeError(f"Accelerate gave {type(engine).__name__}, not the wanted DeepSpeed engine")
    return engine


def step(engine, max_grad_norm: float) -> float:
    """Take the optimizer's step; returns the norm of all gradients before they were clipped. Collective.

    Of one rank alone (stage 0) there is nothing to reduce, and DeepSpeed would not tell the norm: the optimizer is asked itself.
    """
    if not _plain(engine):
        engine.step()
        return float(engine.get_global_grad_norm())
    parameters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)  # as under ZeRO: an expert that saw no token decays all the same
    norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return float(norm)


def trained(engine) -> bool:
    """Whether the optimizer has moments: a step was taken, or they were loaded."""
    return any(state for state in _base(engine).state.values())


def discard(engine) -> None:
    """End an engine. Under ZeRO-3 DeepSpeed would keep its network, and all that hangs on it, in a list and in a cache."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    if engine.optimizer is not None:
        engine.destroy()
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]
    for cell in PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


def full_parameter(parameter: nn.Parameter, *, master: bool, keep: bool) -> Tensor | None:
    """The whole parameter on the CPU, or its float32 master; None unless this rank keeps it. Collective."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if hasattr(parameter, "ds_id") and not master:
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone() if keep else None
    value = safe_get_full_fp32_param(parameter) if master else parameter
    return value.detach().cpu().clone() if keep else None


def write_parameters(engine, stem: Path, *, master: bool) -> None:
    """All parameters, or their float32 masters, by name. Collective."""
    parameters = dict(engine.module.inner.named_parameters())

    def gather(name: str, keep: bool) -> dict[str, Tensor]:
        value = full_parameter(parameters[name], master=master, keep=keep)
        return {name: value} if keep else {}

    _write(stem, {name: _numel(p) * (4 if master else p.element_size()) for name, p in parameters.items()}, gather)


def write_optimizer(engine, stem: Path, *, masters: bool) -> None:
    """`<name>/exp_avg`, `<name>/exp_avg_sq` and `step`; masters: also `master/<name>`, float32. Collective.

    The same files whatever the number of ranks and the ZeRO stage.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    parameters = dict(engine.module.inner.named_parameters())

    def gather(name: str, keep: bool) -> dict[str, Tensor]:
        if name == "step":
            states = _base(engine).state.values()
            return {"step": torch.as_tensor(float(next(iter(states))["step"])).reshape(1)} if keep else {}
        parameter, found = parameters[name], {}
        for moment in _MOMENTS:
            value = _base(engine).state[parameter][moment] if _plain(engine) else safe_get_full_optimizer_state(parameter, moment)
            if keep:
                found[f"{name}/{moment}"] = value.detach().cpu().clone()
        if masters:
            master = full_parameter(parameter, master=True, keep=keep)
            found |= {f"{MASTER}{name}": master} if keep else {}
        return found

    _write(stem, {"step": 4} | {name: 4 * (len(_MOMENTS) + masters) * _numel(p) for name, p in parameters.items()}, gather)


def _write(stem: Path, sizes: dict[str, int], gather) -> None:
    distributed = torch.distributed
    shards.write(stem, sizes, gather, rank=distributed.get_rank(), world=distributed.get_world_size())


def _numel(parameter: nn.Parameter) -> int:
    """Of the whole parameter, also where a rank holds a part."""
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def load_optimizer_state(engine, state: Mapping[str, Tensor]) -> None:
    """What `write_optimizer` wrote, into a new engine on any number of ranks."""
    base, zero = _base(engine), engine.optimizer
    if _plain(engine):
        for name, parameter in engine.module.inner.named_parameters():
            moments = {moment: state[f"{name}/{moment}"].to(parameter, copy=True) for moment in _MOMENTS}
            base.state[parameter] = {"step": state["step"][0].to(parameter.device, copy=True), **moments}
        return
    # ZeRO-3 empties the groups of the optimizer between steps
    flats = getattr(zero, "fp32_partitioned_groups_flat", None) or [flat for group in base.param_groups for flat in group["params"]]
    for flat in flats:
        base.state[flat] = {
            "step": state["step"][0].to(flat.device, copy=True),
            **{moment: torch.zeros_like(flat, memory_format=torch.preserve_format) for moment in _MOMENTS},
        }
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.inner.named_parameters():
        for moment in _MOMENTS:
            _set(parameter, state[f"{name}/{moment}"], moment)


def load_masters(engine, state: Mapping[str, Tensor], prefix: str = "") -> None:
    """Float32 masters of parameters that are held in less."""
    for name, parameter in engine.module.inner.named_parameters():
        _set(parameter, state[prefix + name], None)


def _set(parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
    from deepspeed.utils import (
        safe_get_local_fp32_param,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    if hasattr(parameter, "ds_id"):
        # ZeRO-3 pads the last shard; DeepSpeed's own full setter refuses sizes that do not divide by the ranks
        local = safe_get_local_optimizer_state(parameter, key) if key else safe_get_local_fp32_param(parameter)
        size, rank = local.numel(), torch.distributed.get_rank()
        flat = torch.nn.functional.pad(value.flatten(), (0, size * torch.distributed.get_world_size() - value.numel()))
        shard = flat[size * rank : size * (rank + 1)].to(local)
        safe_set_local_optimizer_state(parameter, shard, key) if key else safe_set_local_fp32_param(parameter, shard)
    elif key:
        safe_set_full_optimizer_state(parameter, value, key)
    else:
        safe_set_full_fp32_param(parameter, value)


def _plain(engine) -> bool:
    """Stage 0: DeepSpeed uses the optimizer as it is."""
    return engine.zero_optimization_stage() == 0


def _base(engine) -> torch.optim.Optimizer:
    return engine.optimizer if _plain(engine) else engine.optimizer.optimizer
