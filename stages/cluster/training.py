"""The training loop of one rank: planned steps over rows, metrics over all ranks, and state to resume from."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stages.algorithms import planner
from stages.algorithms.loss import add_metrics
from stages.algorithms.objectives.sft import Likelihood
from stages.algorithms.schedule import learning_rate_factor
from stages.cluster import saved_state, zero
from stages.cluster.network import Collator
from stages.cluster.recipe import Recipe
from stages.cluster.rows import Rows


class Training:
    """One training of what is held for a role, on one rank of `world`. Collectives keep the ranks in step.

    companion: a row for each row, over which the objective takes its statistic before each step. mixed: rows whose likelihood
    joins each step's loss. The loss of a step is divided once, by the step's own count over all ranks.
    """

    def __init__(self, held, rows: Rows, recipe: Recipe, *, rank: int, world: int, device: torch.device, hardware: dict[str, Any],
                 companion: Rows | None = None, mixed: Rows | None = None):  # fmt: skip
        self.held, self.rows, self.recipe, self.rank, self.world, self.device, self.hardware = (
            held, rows, recipe, rank, world, device, hardware,
        )  # fmt: skip
        self.objective = named(recipe.objective)(**recipe.options)
        self.batches = _Batches(self, rows)
        self.beside = _Batches(self, companion) if companion is not None else None
        self.mixed = _Batches(self, mixed) if mixed is not None else None
        self.steps = [
            step
            for epoch in range(recipe.epochs)
            for step in self.batches.plan(planner.epoch_order(len(rows), seed=recipe.seed, epoch=epoch), recipe.optimizer["batch_size"])
        ]

    def run(self, *, cancelled: Callable[[], bool], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Take the steps that recipe.state does not have: {metrics: [(step, name, value)], steps, cancelled, pace}.

        cancelled: asked after each step; when true on any rank, the state is saved and the training ends. progress: told after
        each step.
        """
        recipe, resume = self.recipe, saved_state.latest(self.recipe.state)
        done = json.loads((resume / "progress.json").read_text()) if resume else {"step": 0, "metrics": []}
        metrics = [tuple(m) for m in done["metrics"]]
        began, tokens, stop, times = time.perf_counter(), 0, False, []
        saved = began
        for index in range(done["step"], len(self.steps)):
            at = time.perf_counter()
            seen, maxima, exact = self._step(index)
            due = (index + 1) % recipe.save_every == 0 or time.perf_counter() - saved > 60 * recipe.save_minutes
            means, peaks, stop, due = self._reduce(seen, maxima, cancelled(), due)
            values = {**means, **peaks, **exact}
            if not all(np.isfinite(v) for v in (values["loss"], values["grad_norm"])):
                raise RuntimeError(f"{recipe.objective}: loss {values['loss']}, gradient norm {values['grad_norm']} at step {index}")
            metrics += [(recipe.first_step + index, name, value) for name, value in sorted(values.items())]
            tokens += int(self.rows.row_tokens_B[self.steps[index].rows].sum())
            times.append(time.perf_counter() - at)
            progress(
                {"done": index + 1, "total": len(self.steps), "tokens_per_s": tokens / (time.perf_counter() - began),
                 "metrics": {"loss": values["loss"]}}
            )  # fmt: skip
            above = recipe.stop_above is not None and values.get(recipe.stop_above[0], 0.0) > recipe.stop_above[1]
            last = above or index + 1 == len(self.steps)
            if recipe.state and self.rank == 0:
                saved_state.mark(recipe.state, index + 1)
            if recipe.state and not last and (stop or due):
                saved = time.perf_counter()
                reached = {"step": index + 1, "metrics": metrics}
                saved_state.save(self.held.engine, Path(recipe.state), reached, precision=self.held.source.precision)
            if last or stop:
                break
        pace = {"steps": len(times), "median_step_s": float(np.median(times or [0.0])), "tokens_per_s": tokens / max(sum(times), 1e-9)}
        return {"metrics": metrics, "steps": len(self.steps), "cancelled": stop and not last, "pace": pace}

    def _step(self, index: int) -> tuple[dict, dict[str, float], dict[str, float]]:
        """Sums and counts of this rank's metrics, their maxima, and what is the same on all ranks."""
        step, objective = self.steps[index], self.objective
        rate = self._learning_rate(self.recipe.first_step + index)
        for group in self.held.engine.optimizer.param_groups:
            group["lr"] = rate
        count = float(self.batches.chosen_B[step.rows].sum()) if objective.unit == "token" else float(len(step.rows))
        seen, maxima = {"loss": (_zero(), _scalar(count / self.world))}, {}
        if self.beside is not None:
            objective.use_statistic(*self._statistic(step.micro_batches[self.rank]))
        for outputs, entropies, batch in self.batches.outputs(
            step.micro_batches[self.rank], objective.temperature, objective.statistic_of_logits
        ):
            loss = objective.loss(outputs, entropies, batch)
            self._backward(loss.sum, count)
            seen = add_metrics(seen, {"loss": (loss.sum.detach().double().cpu(), _zero()), **loss.metrics})
            for name, value in loss.maxima.items():
                maxima[name] = max(maxima.get(name, float("-inf")), float(value))
        if self.mixed is not None:
            seen = add_metrics(seen, self._blend(index))
        return seen, maxima, {"grad_norm": zero.step(self.held.engine, self.recipe.optimizer["max_grad_norm"]), "learning_rate": rate}

    def _learning_rate(self, clock: int) -> float:
        o, total = self.recipe.optimizer, self.recipe.total_steps or len(self.steps)
        if clock < self.recipe.frozen_steps:
            return 0.0
        return o["learning_rate"] * learning_rate_factor(
            clock, kind=o["schedule"], warmup_steps=min(round(o["warmup"] * total), total - 1),
            **({} if o["schedule"] == "constant" else {"total_steps": total, "floor": o["floor"]}),
        )  # fmt: skip

    def _backward(self, total: torch.Tensor, count: float) -> None:
        scaled = planner.deepspeed_scale(total, global_count=count, ranks=self.world, accumulation=1)
        self.held.engine.backward(scaled, scale_wrt_gas=False)

    def _blend(self, index: int) -> dict:
        """Add the gradient of mix_coef * mean NLL of a step's mixed-in rows, as many as its batch; returns its metrics.

        Rows follow each other through reshuffled passes, on the clock of the whole run; Ouyang et al. 2022, eq. 2.
        """
        batches, recipe = self.mixed, self.recipe
        total = len(batches.rows)
        size = min(recipe.optimizer["batch_size"], total)
        first, order = (recipe.first_step + index) * size, []
        while len(order) < size:
            epoch, offset = divmod(first + len(order), total)
            order += planner.epoch_order(total, seed=recipe.mix_seed, epoch=epoch)[offset : offset + size - len(order)]
        (step,) = batches.plan(order, size)
        tokens, seen = float(batches.chosen_B[step.rows].sum()), _zero()
        for outputs, _, batch in batches.outputs(step.micro_batches[self.rank], 1.0, None):
            loss = Likelihood().loss(outputs, None, batch)
            self._backward(loss.sum * recipe.mix_coef, tokens)
            seen += loss.sum.detach().double().cpu()
        return {"ptx_loss": (seen, _scalar(tokens / self.world))}

    def _statistic(self, micro_batches: list[list[int]]) -> list[float]:
        """Sum and count of the companion rows over all micro-batches and ranks of a step."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for outputs, _, batch in self.beside.outputs(micro_batches, self.objective.temperature, None):
                total += torch.stack(self.objective.statistic(outputs, batch)).to(total)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def _reduce(self, seen: dict, maxima: dict[str, float], stop: bool, due: bool) -> tuple[dict, dict[str, float], bool, bool]:
        """Metrics over all ranks, divided once; whether any rank was told to stop; whether any is due to save."""
        names, peaks = sorted(seen), sorted(maxima)
        flat = torch.tensor([*(float(x) for n in names for x in seen[n]), stop, due], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(flat)
        top = torch.tensor([maxima[n] for n in peaks] or [0.0], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(top, op=torch.distributed.ReduceOp.MAX)
        flat, top = flat.tolist(), top.tolist()
        means = {n: flat[2 * i] / flat[2 * i + 1] for i, n in enumerate(names) if flat[2 * i + 1]}
        return means, dict(zip(peaks, top)), flat[-2] > 0, flat[-1] > 0


class _Batches:
    """Rows that a training goes over: planned, collated and put through the model."""

    def __init__(self, training: Training, rows: Rows):
        self.training, self.rows = training, rows
        self.lengths = rows.row_tokens_B.tolist()
        self.chosen_B = rows.chosen_S.reshape(-1, rows.per_row).sum(axis=1)
        self.shortest = int(np.argmin(rows.row_tokens_B))
        """The row that stands in, with no weight, where a rank has none."""
        self.collator = Collator(
            rows, select=training.objective.select, pack_length=training.hardware["pack_length"],
            pad_id=training.held.network.config.pad_token_id or 0, device=training.device,
        )  # fmt: skip

    def plan(self, order: list[int], rows_per_step: int) -> list[planner.Step]:
        tokens = max(self.training.hardware["micro_batch_tokens"], max(self.lengths))
        return planner.plan_steps(
            self.lengths, order, rows_per_step=rows_per_step, ranks=self.training.world, tokens_per_micro_batch=tokens
        )

    def outputs(self, micro_batches: list[list[int]], temperature: float, statistic: str | None):
        """(outputs_SL, statistic_SL or None, MicroBatch) of each micro-batch; the shortest row fills an empty one."""
        for members in micro_batches:
            filler = not members
            members = members or [self.shortest]
            outputs_N, statistic_N = self.training.held(*self.collator.inputs(members), temperature, statistic)
            yield (
                self.collator.padded(outputs_N, members),
                None if statistic_N is None else self.collator.padded(statistic_N, members),
                self.collator.micro_batch(members, filler=filler),
            )


def named(reference: str):
    """`module:name` as the object."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def _zero() -> torch.Tensor:
    return torch.zeros((), dtype=torch.float64)


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
