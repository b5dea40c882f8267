"""The one trainer core: a Ray actor for each rank, holding models by role, that trains any objective and scores rows."""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
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
        import logging

        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        deepspeed.init_distributed(dist_backend="nccl" if self.cuda else "gloo", timeout=timedelta(minutes=10))
        if torch.distributed.get_world_size() != self.world:
            raise RuntimeError("torch.distributed has another number of ranks than the group")
        import gc

        import stages.cluster.network  # noqa: F401  transformers, so that the first job does not wait for it

        gc.freeze()  # the imported modules: collecting them anew costs 0.3 s each time a model is dropped
        self._joined = address

    def _find_compiler(self) -> None:
        """Compiled code is kept where only we can write."""
        import shutil

        from stages.cluster.paths import state_dir

        compiler = os.environ.get("CXX", "g++")
        if not self.cuda and not shutil.which(compiler):
            raise UserError(f"hardware.compile: no C++ compiler ({compiler}) on {os.uname().nodename}; install one, or set compile: false")
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

        from stages.cluster import zero

        held = self._models.get(role)
        if not resume and held and held.continues(source, optimizer):
            return held
        self._drop(role)
        config = self._zero_config(source.precision, optimizer["max_grad_norm"])
        network = self._load(source, config)
        weights = zero.read_tensors(resume / "weights.safetensors") if resume else None
        if weights is not None:
            saved_state.copy_into(network, weights)
        adamw = torch.optim.AdamW(
            [p for p in network.parameters() if p.requires_grad],
            lr=optimizer["learning_rate"], betas=tuple(optimizer["betas"]), eps=optimizer["eps"],
            weight_decay=optimizer["weight_decay"], fused=True,
        )  # fmt: skip
        held = _Held(source, network, zero.make_engine(network, config, adamw), optimizer)
        held.engine.eval()  # dropout stays off
        saved = resume / "optimizer.safetensors" if resume else source.optimizer
        if saved:
            state = zero.read_tensors(Path(saved))
            if source.precision != "float32":
                masters = weights if weights is not None else {k[7:]: v for k, v in state.items() if k.startswith("master/")}
                zero.load_masters(held.engine, masters)
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
        with self.working(f"training {role}"):
            done = self._train(role, source, rows, recipe, companion, mixed)
            self.rename(role, token or f"{source.state_id}+")
            return done

    def _train(self, role: str, source: Source, rows: Rows, recipe: Recipe, companion: Rows | None, mixed: Rows | None) -> dict[str, Any]:
        import numpy as np
        import torch

        from stages.algorithms import planner
        from stages.algorithms.loss import add_metrics
        from stages.algorithms.schedule import learning_rate_factor
        from stages.cluster import zero
        from stages.cluster.network import Collator

        self._cancel.clear()
        self._progress = {}
        o = recipe.optimizer
        resume = saved_state.latest(recipe.state)
        held = self._trainable(role, source, o, resume)
        objective = _named(recipe.objective)(**recipe.options)
        collate = lambda these: Collator(
            these, select=objective.select, pack_length=self.hardware["pack_length"],
            pad_id=held.network.config.pad_token_id or 0, device=self.device,
        )  # fmt: skip
        collator = collate(rows)
        beside = collate(companion) if companion is not None else None
        lengths = rows.row_tokens_B.tolist()
        steps = [
            step
            for epoch in range(recipe.epochs)
            for step in planner.plan_steps(
                lengths, planner.epoch_order(len(rows), seed=recipe.seed, epoch=epoch), rows_per_step=o["batch_size"],
                ranks=self.world, tokens_per_micro_batch=max(self.hardware["micro_batch_tokens"], max(lengths)),
            )
        ]  # fmt: skip
        blend = self._blend(mixed, recipe, len(steps), collate) if mixed is not None else None
        chosen_B = rows.chosen_S.reshape(-1, rows.per_row).sum(axis=1)
        shortest = int(np.argmin(rows.row_tokens_B))
        total = recipe.total_steps or len(steps)
        done = json.loads((resume / "progress.json").read_text()) if resume else {"step": 0, "metrics": []}
        metrics = [tuple(m) for m in done["metrics"]]
        began, tokens, cancelled = time.perf_counter(), 0, False
        saved, times = began, []
        for index in range(done["step"], len(steps)):
            step, clock, at = steps[index], recipe.first_step + index, time.perf_counter()
            rate = o["learning_rate"] * learning_rate_factor(
                clock, kind=o["schedule"], warmup_steps=min(round(o["warmup"] * total), total - 1),
                **({} if o["schedule"] == "constant" else {"total_steps": total, "floor": o["floor"]}),
            )  # fmt: skip
            rate = 0.0 if clock < recipe.frozen_steps else rate
            for group in held.engine.optimizer.param_groups:
                group["lr"] = rate
            count = float(chosen_B[step.rows].sum()) if objective.unit == "token" else float(len(step.rows))
            seen, maxima = {"loss": (torch.zeros((), dtype=torch.float64), torch.tensor(count / self.world, dtype=torch.float64))}, {}
            if beside is not None:
                objective.use_statistic(*self._statistic(held, objective, beside, step.micro_batches[self.rank], shortest))
            for members in step.micro_batches[self.rank]:
                filler = not members
                members = members or [shortest]
                ids, positions, select, targets = collator.inputs(members)
                outputs_N, entropy_N = held(ids, positions, select, targets, objective.temperature, objective.statistic_of_logits)
                loss = objective.loss(
                    collator.padded(outputs_N, members),
                    None if entropy_N is None else collator.padded(entropy_N, members),
                    collator.micro_batch(members, filler=filler),
                )
                held.engine.backward(
                    planner.deepspeed_scale(loss.sum, global_count=count, ranks=self.world, accumulation=1), scale_wrt_gas=False
                )
                seen = add_metrics(seen, {"loss": (loss.sum.detach().double().cpu(), torch.zeros((), dtype=torch.float64)), **loss.metrics})
                for name, value in loss.maxima.items():
                    maxima[name] = max(maxima.get(name, float("-inf")), float(value))
            if blend is not None:
                seen = add_metrics(seen, blend(held, index))
            grad_norm = zero.step(held.engine, o["max_grad_norm"])
            due = (index + 1) % recipe.save_every == 0 or time.perf_counter() - saved > 60 * recipe.save_minutes
            means, peaks, cancelled, due = self._reduce(seen, maxima, due)
            values = {**means, **peaks, "grad_norm": grad_norm, "learning_rate": rate}
            if not all(np.isfinite(v) for v in (values["loss"], values["grad_norm"])):
                raise RuntimeError(f"{role}: loss {values['loss']}, gradient norm {values['grad_norm']} at step {index}")
            metrics += [(clock, name, value) for name, value in sorted(values.items())]
            tokens += int(rows.row_tokens_B[step.rows].sum())
            times.append(time.perf_counter() - at)
            self._progress = {
                "done": index + 1, "total": len(steps), "tokens_per_s": tokens / (time.perf_counter() - began),
                "metrics": {"loss": values["loss"]},
            }  # fmt: skip
            stopped = recipe.stop_above is not None and values.get(recipe.stop_above[0], 0.0) > recipe.stop_above[1]
            last = stopped or index + 1 == len(steps)
            if recipe.state and self.rank == 0:
                saved_state.mark(recipe.state, index + 1)
            if recipe.state and not last and (cancelled or due):
                saved = time.perf_counter()
                saved_state.save(held.engine, Path(recipe.state), {"step": index + 1, "metrics": metrics}, precision=held.source.precision)
            if last or cancelled:
                break
        pace = {"steps": len(times), "median_step_s": float(np.median(times or [0.0])), "tokens_per_s": tokens / max(sum(times), 1e-9)}
        return {"metrics": metrics, "steps": len(steps), "cancelled": cancelled and not last, "pace": pace}

    def _blend(self, mixed: Rows, recipe: Recipe, count: int, collate):
        """A function that adds the gradient of mix_coef * mean NLL of step `index`'s mixed-in rows; returns its metrics.

        Rows follow each other through reshuffled passes, on the clock of the whole run; Ouyang et al. 2022, eq. 2.
        """
        import numpy as np
        import torch

        from stages.algorithms import planner
        from stages.algorithms.objectives.sft import Likelihood

        size, lengths = min(recipe.optimizer["batch_size"], len(mixed)), mixed.row_tokens_B.tolist()
        likelihood, collator, shortest = Likelihood(), collate(mixed), int(np.argmin(mixed.row_tokens_B))
        chosen_B = mixed.chosen_S

        def add(held: _Held, index: int) -> dict:
            first = (recipe.first_step + index) * size
            order: list[int] = []
            while len(order) < size:
                epoch, offset = divmod(first + len(order), len(mixed))
                order += planner.epoch_order(len(mixed), seed=recipe.mix_seed, epoch=epoch)[offset : offset + size - len(order)]
            (step,) = planner.plan_steps(
                lengths, order, rows_per_step=size, ranks=self.world,
                tokens_per_micro_batch=max(self.hardware["micro_batch_tokens"], max(lengths)),
            )  # fmt: skip
            tokens, seen = float(chosen_B[step.rows].sum()), torch.zeros((), dtype=torch.float64)
            for members in step.micro_batches[self.rank]:
                filler, members = not members, members or [shortest]
                outputs_N, _ = held(*collator.inputs(members), 1.0, None)
                loss = likelihood.loss(collator.padded(outputs_N, members), None, collator.micro_batch(members, filler=filler))
                scaled = planner.deepspeed_scale(loss.sum * recipe.mix_coef, global_count=tokens, ranks=self.world, accumulation=1)
                held.engine.backward(scaled, scale_wrt_gas=False)
                seen += loss.sum.detach().double().cpu()
            return {"ptx_loss": (seen, torch.tensor(tokens / self.world, dtype=torch.float64))}

        return add

    def _statistic(self, held: _Held, objective, beside, micro_batches: list[list[int]], shortest: int) -> list[float]:
        """Sum and count over all micro-batches and ranks of a step."""
        import torch

        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for members in micro_batches:
                batch = beside.micro_batch(members or [shortest], filler=not members)
                outputs_N, _ = held(*beside.inputs(members or [shortest]), objective.temperature, None)
                total += torch.stack(objective.statistic(beside.padded(outputs_N, members or [shortest]), batch)).to(total)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def _reduce(self, seen: dict, maxima: dict[str, float], due: bool) -> tuple[dict[str, float], dict[str, float], bool, bool]:
        """Metrics over all ranks, divided once; whether any rank was told to stop; whether any is due to save."""
        import torch

        names, peaks = sorted(seen), sorted(maxima)
        flat = torch.tensor(
            [float(x) for n in names for x in seen[n]] + [float(due), float(self._cancel.is_set())], dtype=torch.float64, device=self.device
        )
        torch.distributed.all_reduce(flat)
        top = torch.tensor([maxima[n] for n in peaks] or [0.0], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX)
        flat, top = flat.tolist(), top.tolist()
        means = {n: flat[2 * i] / flat[2 * i + 1] for i, n in enumerate(names) if flat[2 * i + 1]}
        return means, dict(zip(peaks, top)), flat[-1] > 0, flat[-2] > 0

    def save(self, role: str, folder: str, tokenizer_from: str, optimizer: str | None = None) -> None:
        """Write a role's weights as a Hugging Face folder (rank 0), and its optimizer state into a file if one is named."""
        from stages.cluster import network, zero

        held, keep = self._models[role], self.rank == 0
        tensors = zero.full_parameters(held.network, master=False, keep=keep)
        state = zero.full_optimizer_state(held.engine, keep=keep) if optimizer else {}
        if optimizer and held.source.precision != "float32":
            masters = zero.full_parameters(held.network, master=True, keep=keep)
            state |= {f"master/{name}": value for name, value in masters.items()}
        if keep:
            network.save(held.network, tensors, Path(folder), tokenizer_from)
            if optimizer:
                Path(optimizer).parent.mkdir(parents=True, exist_ok=True)
                zero.write_tensors(Path(optimizer), state)

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
        return indexes, values

    def apply(self, function: str, **arguments):
        """Call `stages.module:function` here, where torch and transformers are loaded."""
        return _named(function)(**arguments)

    # -- answered while busy --------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        return dict(self._progress)

    @ray.method(concurrency_group="control")
    def cancel(self) -> None:
        """Stop at the end of the current step, with its state saved."""
        self._cancel.set()


def _named(reference: str):
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)
