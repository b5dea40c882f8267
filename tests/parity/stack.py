"""The real stack at a small size: Ray actors of one and two ranks, an engine, tiny models, random rows."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file

from stages.cluster.groups import Groups
from stages.cluster.recipe import Recipe, Source
from stages.cluster.rows import Rows
from stages.cluster.shards import Tensors

LIKELIHOOD = "stages.algorithms.objectives.sft:Likelihood"
BRADLEY_TERRY = "stages.algorithms.objectives.pairs:BradleyTerry"
ACTOR = "stages.algorithms.objectives.actor:Actor"
OPTIMIZER = {
    "learning_rate": 3e-3, "batch_size": 6, "schedule": "cosine", "warmup": 0.0, "floor": 0.1, "weight_decay": 0.1,
    "betas": (0.9, 0.95), "eps": 1e-6, "max_grad_norm": 0.5,
}  # fmt: skip
"""Clips every step. With an eps of 1e-8 AdamW turns the rounding of a gradient that is nearly zero into a whole step."""
HARDWARE = {
    "ranks": 1, "threads": 1, "zero_stage": 2, "offload_optimizer": False, "micro_batch_tokens": 64, "pack_length": 0,
    "compile": False, "recompute": False,
    "colocate": [["actor", "critic", "reference", "reward"]],
    "engines": {"count": 1, "tensor_parallel": 1, "threads": 1, "max_num_seqs": 32, "max_model_len": 256, "kv_cache_mb": 16,
                "gpu_memory": 0.1, "colocate": True},
}  # fmt: skip
_number = itertools.count()


class Context:
    """What the runner's context is to Groups, with nobody behind it."""

    def __init__(self, name: str, hardware: dict[str, Any]):
        self.runtime = {"code_id": f"{name:_<12}", "hardware": HARDWARE | hardware}
        self.cancelled, self.info, self.logged = threading.Event(), {}, []
        self.watch = lambda done: None
        """Called with the number of steps done."""

    @contextlib.contextmanager
    def phase(self, name):
        yield

    def progress(self, phase, done, total, **_):
        self.watch(done)

    def log(self, message):
        self.logged.append(message)

    def resumed(self, what, kept, again, unit):
        self.log(f"{what} goes on after {kept} {unit}")

    def check(self):
        pass

    def check_code(self):
        pass


@dataclass(frozen=True)
class Trained:
    """What a training left: metrics in memory, weights and optimizer state in files."""

    metrics: list[tuple[int, str, float]]
    source: Source
    """Its weights and optimizer state, for going on from them."""

    @property
    def folder(self) -> Path:
        return Path(self.source.folder)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value for path in self.folder.glob("*.safetensors") for name, value in load_file(path).items()}

    @property
    def optimizer(self) -> dict[str, torch.Tensor]:
        return dict(Tensors(Path(self.source.optimizer)))

    def metric(self, name: str) -> list[float]:
        return [value for _, found, value in self.metrics if found == name]


class Stack(Groups):
    """A trainer group, or an engine, as stages see it. Models are saved under `scratch`."""

    def __init__(self, name: str, scratch: Path, **hardware):
        super().__init__(Context(name, hardware))
        self.scratch = scratch

    def start(self) -> list[Any]:
        """The actors of the trainer ranks."""
        return self._group("actor").start().ranks

    def on_ranks(self, function, *args) -> list[Any]:
        """function(the rank's TrainerRank, *args), run in the process of each rank."""
        return ray.get([rank.__ray_call__.remote(function, *args) for rank in self.start()])

    @contextlib.contextmanager
    def hardware(self, **changes):
        """The ranks work as if they had been made for other hardware; new processes for each would take 10 s."""
        before = self.on_ranks(_replace_hardware, changes)[0]
        try:
            yield
        finally:
            self.on_ranks(_replace_hardware, before)

    def fit(self, source: Source, rows: Rows, objective: str = LIKELIHOOD, *, role: str = "actor", epochs: int = 1,
            seed: int = 5, optimizer: dict[str, Any] | None = None, companion: Rows | None = None,
            mixed: Rows | None = None, **recipe) -> Trained:  # fmt: skip
        """Train a role on rows and save it."""
        made = Recipe(objective, OPTIMIZER | (optimizer or {}), epochs, seed, **recipe)
        kept = self._place(source, trained=True)
        done = self.train(
            role, source, rows, made, "test", folder=Path(kept.folder), tokenizer_from=Path(source.folder),
            optimizer_to=Path(kept.optimizer), companion=companion, mixed=mixed,
        )  # fmt: skip
        self.rename(role, kept.state_id)
        return Trained(done["metrics"], kept)

    @contextlib.contextmanager
    def recorded(self):
        """A list that holds afterwards, for each rank, (members, filler) of every micro-batch that it trained on."""
        self.on_ranks(_record)
        seen: list[list[tuple[list[int], bool]]] = []
        try:
            yield seen
        finally:
            seen += self.on_ranks(_recorded)

    def keep(self, role: str, source: Source, *, trained: bool = True) -> Source:
        """Save what is held for a role, which `source` was, and name it for that."""
        kept = self._place(source, trained=trained)
        self._group(role).start().ask("save", role, kept.folder, source.folder, kept.optimizer)
        self.rename(role, kept.state_id)
        return kept

    def _place(self, source: Source, *, trained: bool) -> Source:
        number = next(_number)
        optimizer = str(self.scratch / f"optimizer-{number}") if trained else None
        return replace(source, state_id=f"kept-{number}", folder=str(self.scratch / f"model-{number}"), optimizer=optimizer)


def _replace_hardware(rank, changes):
    before = {name: rank.hardware[name] for name in changes}
    rank.hardware = rank.hardware | changes
    return before


def freeze(rank):
    """Spare the garbage collector what was imported: a rank collects when it drops a model, and would take 0.3 s each time."""
    import gc

    gc.freeze()


def _record(rank):
    from stages.cluster.network import Collator

    seen, made = [], Collator.micro_batch

    def micro_batch(self, members, *, filler):
        seen.append((list(members), filler))
        return made(self, members, filler=filler)

    Collator.micro_batch = micro_batch
    rank.recorded = lambda: setattr(Collator, "micro_batch", made) or seen


def _recorded(rank):
    return rank.recorded()


def fresh(folder: Path, kind: str = "causal", **fields) -> Source:
    """The weights of a folder under a name that no rank holds yet, so that they are loaded."""
    return Source(f"fresh-{next(_number)}", str(folder), kind, **fields)


def sequences(count: int, *, seed: int = 0, prompt: tuple[int, int] = (2, 8), response: tuple[int, int] = (3, 16)):
    """(prompt ids, response ids), with lengths in the given ranges, both ends included."""
    r = random.Random(seed)
    draw = lambda low, high: [r.randrange(5, 261) for _ in range(r.randint(low, high))]
    return [(draw(*prompt), draw(*response)) for _ in range(count)]


def gap(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Largest relative difference between tensors of the same name: norm of the difference by norm of the right one."""
    assert left.keys() == right.keys()
    return max((float((left[n].double() - right[n].double()).norm() / right[n].double().norm()), n) for n in right)


def same_bytes(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in right)


def assert_same_training(left: Trained, right: Trained, *, within: float = 1e-5, loss_terms: float = 0.0) -> None:
    """Parameters, optimizer state, and every metric of every step agree: relatively; means that may cancel, absolutely.

    loss_terms: size of the terms of a loss that cancel in its sum.
    """
    assert [m[:2] for m in left.metrics] == [m[:2] for m in right.metrics]
    for (step, name, one), (_, _, other) in zip(left.metrics, right.metrics):
        floor = loss_terms if name == "loss" else 0.0 if name in ("grad_norm", "learning_rate") else 1.0
        size = max(abs(other), floor)
        assert abs(one - other) <= within * size, f"{name} of step {step}: {one} and {other}"
    assert gap(left.weights, right.weights) < (within, "")
    assert gap(left.optimizer, right.optimizer) < (within, "")
