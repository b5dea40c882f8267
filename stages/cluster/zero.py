"""DeepSpeed ZeRO engines made by Accelerate, and their full parameters and optimizer state, whatever the sharding."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


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


def full_parameters(network: nn.Module, *, master: bool, keep: bool) -> dict[str, Tensor]:
    """name -> whole parameter on the CPU (float32 masters where asked and there are any). Collective; keep: on rank 0."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in network.inner.named_parameters():
        if master:
            value = safe_get_full_fp32_param(parameter)
            if keep:
                found[name] = value.detach().cpu().clone()
        elif hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                if keep:
                    found[name] = parameter.detach().cpu().clone()
        elif keep:
            found[name] = parameter.detach().cpu().clone()
    return found


def full_optimizer_state(engine, *, keep: bool) -> dict[str, Tensor]:
    """`<name>/exp_avg`, `<name>/exp_avg_sq` whole, and `step`. The same for any number of ranks. Collective."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.inner.named_parameters():
        for moment in _MOMENTS:
            value = _base(engine).state[parameter][moment] if _plain(engine) else safe_get_full_optimizer_state(parameter, moment)
            if keep:
                found[f"{name}/{moment}"] = value.detach().cpu().clone()
    if keep:
        states = list(_base(engine).state.values())
        found["step"] = torch.as_tensor(float(states[0]["step"])).reshape(1)
    return found


def load_optimizer_state(engine, state: dict[str, Tensor]) -> None:
    """The inverse of full_optimizer_state, into a new engine on any number of ranks."""
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


def load_masters(engine, state: dict[str, Tensor]) -> None:
    """Float32 masters of parameters that are held in less."""
    for name, parameter in engine.module.inner.named_parameters():
        _set(parameter, state[name], None)


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


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in sorted(tensors.items())}, str(path))


def read_tensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(str(path))
