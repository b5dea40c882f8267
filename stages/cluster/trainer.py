"""The one trainer core: a Ray actor for each rank, holding models by role, that trains any objective and scores rows."""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from stages.cluster import saved_state
from stages.cluster.actors import Resident
from stages.cluster.recipe import Recipe, Source
from stages.cluster.rows import Rows
from stages.errors import UserError

_MADE_WITH = ("betas", "eps", "weight_decay", "max_grad_norm")
"""Fields of config_models.Optimizer that an engine keeps for good; the learning rate is set at every step."""


@dataclass
class _Held:
    source: Source
    network: Any
    engine: Any = None
    optimizer: dict[str, Any] | None = None
    """Fields of config_models.Optimizer that the engine was made with."""

    def is_of(self, source: Source) -> bool:
        """Whether these are the weights of a source, opened as it asks."""
        return all(getattr(self.source, f) == getattr(source, f) for f in ("state_id", "kind", "precision"))

    def continues(self, source: Source, optimizer: dict[str, Any]) -> bool:
        """Whether the engine stands where the source's optimizer state does, and would be made the same now."""
        if not source.optimizer or not self.is_of(source) or self.engine is None or self.engine.optimizer is None:
            return False
        from stages.cluster import zero

        return zero.trained(self.engine) and all(self.optimizer[f] == optimizer[f] for f in _MADE_WITH)

    def __call__(self, *inputs):
        return (self.engine or self.network)(*inputs)


class TrainerRank(Resident):
    """One rank of a trainer group. Calls to all ranks of a group go out together; collectives keep them in step."""

    def __init__(self, *, name: str, code_id: str, rank: int, world: int, hardware: dict[str, Any], environment: dict[str, str]):
        super().__init__(role=f"{name} rank {rank}/{world}", code_id=code_id)
        os.environ.update(environment)
        self.rank, self.world, self.hardware = rank, world, hardware
        self._models: dict[str, _Held] = {}
        self._progress: dict[str, Any] = {}
        self._cancel = threading.Event()
        self._joined: str | None = None

    def address(self) -> str:
        """HOST:PORT free for the group's rendezvous, on the node of this rank."""
        import socket

        with socket.socket() as s:
            s.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{s.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Start torch.distributed; every later collective has a deadline."""
        host, _, port = address.rpartition(":")
        os.environ.update(
            MASTER_ADDR=host, MASTER_PORT=port, RANK=str(self.rank), WORLD_SIZE=str(self.world),
            LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", ACCELERATE_USE_DEEPSPEED="true",
        )  # fmt: skip
        os.environ.pop("ACCELERATE_USE_CPU", None)  # it would silently give DistributedDataParallel
        from datetime import timedelta

        import torch

        torch.set_num_threads(self.hardware["threads"])
        self.cuda = torch.cuda.is_available()
        if not self.cuda:
            os.environ["DS_ACCELERATOR"] = "cpu"
        self.device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        if self.cuda:
            self._share_gpu()
        import logging

        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(
            dist_backend="nccl" if self.cuda else "gloo", timeout=timedelta(hours=1)
        )  # others wait while rank 0 writes a state
        if torch.distributed.get_world_size() != self.world:
            raise RuntimeError("torch.distributed has another number of ranks than the group")
        import gc
        import pkgutil

        import stages.cluster.training  # noqa: F401  with transformers: no job waits for it, or gets what is edited from here on
        from stages.algorithms import objectives

        for module in pkgutil.iter_modules(objectives.__path__):
            importlib.import_module(f"{objectives.__name__}.{module.name}")
        gc.freeze()  # the imported modules: collecting them anew costs 0.3 s each time a model is dropped
        self._joined = address

    def _share_gpu(self) -> None:
        """Leave an engine its part of the memory, and let the same work give the same bytes as far as the GPU's libraries can."""
        import torch

        engines = self.hardware["engines"]
        if engines["colocate"]:
            torch.cuda.set_per_process_memory_fraction((0.95 - engines["gpu_memory"]) / len(self.hardware["colocate"]))
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False

    def _give_back(self) -> None:
        """What the allocator keeps of the GPU's memory, to the engine that shares it."""
        if self.cuda:
            import torch

            torch.cuda.empty_cache()

    def _find_compiler(self) -> None:
        """Compiled code is kept where only we can write."""
        import shutil
        import sysconfig

        from stages.cluster.paths import state_dir

        compiler = os.environ.get("CC", "gcc") if self.cuda else os.environ.get("CXX", "g++")
        header = Path(sysconfig.get_path("include"), "Python.h")
        for there, what in ((shutil.which(compiler), f"compiler ({compiler})"), (header.exists(), f"{header}")):
            if not there:
                raise UserError(f"hardware.compile: no {what} on {os.uname().nodename}; install it, or set compile: false")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(state_dir(), "compiled")

    @ray.method(concurrency_group="control")
    def joined(self) -> str | None:
        """The rendezvous that this rank is part of."""
        return self._joined

    # -- models ---------------------------------------------------------------------------------------------------

    def _zero_config(self, precision: str, max_grad_norm: float = 1.0) -> dict:
        from stages.cluster import zero

        return zero.configuration(
            stage=self.hardware["zero_stage"], world=self.world, precision=precision, max_grad_norm=max_grad_norm,
            offload=self.hardware["offload_optimizer"],
        )  # fmt: skip

    def _load(self, source: Source, config: dict):
        from stages.cluster import network, zero

        partition = zero.partitioned_loading(config)  # kept alive while the weights load
        loaded = network.load(source.folder, source.kind, precision=source.precision, seed=source.seed)
        del partition
        if self.hardware["compile"]:
            self._find_compiler()
            network.compile_blocks(loaded)
        return loaded.to(self.device)

    def _frozen(self, role: str, source: Source) -> _Held:
        """A model to score with: the held one if it has these weights."""
        held = self._models.get(role)
        if held is None or not held.is_of(source):
            self._drop(role)
            config = self._zero_config(source.precision)
            held = _Held(source, self._load(source, config))
            if self.hardware["zero_stage"] == 3:
                from stages.cluster import zero

                held.engine = zero.make_engine(held.network, config, None)
            self._keep(role, held)
        return held

    def _trainable(self, role: str, source: Source, optimizer: dict, resume: Path | None) -> _Held:
        """A model to train: the held engine if it stands where the source's optimizer state does."""
        import torch

        from stages.cluster import shards, zero
        from stages.cluster.network import recompute_blocks

        held = self._models.get(role)
        if not resume and held and held.continues(source, optimizer):
            return held
        self._drop(role)
        config = self._zero_config(source.precision, optimizer["max_grad_norm"])
        network = self._load(source, config)
        weights = shards.Tensors(resume / "weights") if resume else None
        if weights is not None:
            saved_state.copy_into(network, weights)
        adamw = torch.optim.AdamW(
            [p for p in network.parameters() if p.requires_grad],
            lr=optimizer["learning_rate"], betas=tuple(optimizer["betas"]), eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"], fused=True,
        )  # fmt: skip
        held = _Held(source, network, zero.make_engine(network, config, adamw), optimizer)
        held.engine.eval()  # dropout stays off
        if self.hardware["recompute"]:
            recompute_blocks(network)
        saved = resume / "optimizer" if resume else source.optimizer
        if saved:
            state = shards.Tensors(Path(saved))
            if source.precision != "float32":
                zero.load_masters(held.engine, *((state, zero.MASTER) if weights is None else (weights,)))
            zero.load_optimizer_state(held.engine, state)
        self._keep(role, held)
        return held

    def _keep(self, role: str, held: _Held) -> None:
        self._models[role] = held
        self.hold(role, held.source.state_id)

    def _drop(self, role: str) -> None:
        held = self._models.pop(role, None)
        if held is not None:
            self.release(role)
            if held.engine is not None:
                from stages.cluster import zero

                zero.discard(held.engine)
            del held
            import gc

            gc.collect()
            self._give_back()

    def rename(self, role: str, state_id: str, expected: str | None = None) -> None:
        """The weights held for a role have become an artifact's, if they still are those that were `expected`."""
        from dataclasses import replace

        held = self._models.get(role)
        if held is None or (expected is not None and held.source.state_id != expected):
            return  # the group was made again since, or another job has trained: nothing of the artifact is warm
        held.source = replace(held.source, state_id=state_id)
        self.hold(role, state_id)

    # -- work -----------------------------------------------------------------------------------------------------

    def train(self, role: str, source: Source, rows: Rows, recipe: Recipe, companion: Rows | None = None,
              mixed: Rows | None = None, token: str = "") -> dict[str, Any]:  # fmt: skip
        """Train a role on rows; returns {"metrics": [(step, name, value)], "steps": n, "cancelled": bool}.

        companion: a row for each row, over which the objective takes its statistic before each step. mixed: rows whose
        likelihood joins each step's loss, as many as the step's batch, weighted by recipe.mix_coef. token: the name of
        what was trained, until it is an artifact.
        Resumes from recipe.state. The loss of a step is divided once, by the step's own count over all ranks.
        """
        from stages.cluster.training import Training

        with self.working(f"training {role}"):
            self._cancel.clear()
            self._progress = {}
            held = self._trainable(role, source, recipe.optimizer, saved_state.latest(recipe.state))
            training = Training(held, rows, recipe, rank=self.rank, world=self.world, device=self.device, hardware=self.hardware,
                                companion=companion, mixed=mixed)  # fmt: skip
            done = training.run(cancelled=self._cancel.is_set, progress=self._report)
            self._give_back()
            self.rename(role, token or f"{source.state_id}+")
            return done

    def _report(self, progress: dict[str, Any]) -> None:
        self._progress = progress

    def save(self, role: str, folder: str, tokenizer_from: str, optimizer: str | None = None) -> None:
        """Write a role's weights as a Hugging Face folder (rank 0), and its optimizer state (all ranks) if a stem is named."""
        from stages.cluster import network, zero

        held, keep = self._models[role], self.rank == 0
        tensors = {name: zero.full_parameter(p, master=False, keep=keep) for name, p in held.network.inner.named_parameters()}
        if keep:
            network.save(held.network, tensors, Path(folder), tokenizer_from)
        del tensors
        if optimizer:
            zero.write_optimizer(held.engine, Path(optimizer), masters=held.source.precision != "float32")
        self._give_back()

    def score(self, role: str, source: Source, rows: Rows, *, select: str, temperature: float = 1.0,
              statistic: str | None = None):  # fmt: skip
        """This rank's share of the outputs at the chosen tokens: (row indexes, an array per sequence).

        statistic: as of Network.forward; arrays are then [2, tokens], outputs and statistic.
        """
        import numpy as np
        import torch

        from stages.algorithms import planner
        from stages.cluster.network import Collator

        held = self._frozen(role, source)
        collator = Collator(
            rows, select=select, pack_length=self.hardware["pack_length"],
            pad_id=held.network.config.pad_token_id or 0, device=self.device,
        )  # fmt: skip
        lengths = rows.row_tokens_B.tolist()
        (step,) = planner.plan_steps(
            lengths, range(len(rows)), rows_per_step=len(rows), ranks=self.world,
            tokens_per_micro_batch=max(4 * self.hardware["micro_batch_tokens"], max(lengths)),
        )  # fmt: skip
        indexes, values = [], []
        shortest = int(np.argmin(rows.row_tokens_B))
        with torch.no_grad():
            for members in step.micro_batches[self.rank]:
                if not members and self.hardware["zero_stage"] != 3:
                    continue
                outputs_N, statistic_N = held(*collator.inputs(members or [shortest]), temperature, statistic)
                if members:
                    found = torch.stack([outputs_N.float(), statistic_N.float()]) if statistic else outputs_N.float()
                    counts = rows.chosen_S.reshape(-1, rows.per_row)[members].flatten()
                    values += np.split(found.cpu().numpy(), np.cumsum(counts)[:-1], axis=-1)
                    indexes += members
        self._give_back()
        return indexes, values

    def apply(self, function: str, **arguments):
        """Call `stages.module:function` here, where torch and transformers are loaded."""
        from stages.cluster.training import named

        return named(function)(**arguments)

    # -- answered while busy --------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        return dict(self._progress)

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Stop at the end of the current step, with its state saved."""
        self._cancel.set()
