"""The whole configuration: data sets, a graph of models, evaluation, sweeps, hardware, cluster.

These types give defaults, bounds, explanations, the JSON schema and config/README.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from stages.config_base import Fraction, Rewards, Section
from stages.config_data import Data
from stages.config_models import Model, Sampling


class Evaluation(Section):
    """How finished policies are compared."""

    baseline: str = "sft"
    """The policy that the others are compared with, and the reference of the reported KL."""
    reward: Rewards = {"rm": 1.0}
    """What scores the answers, as a model's `reward`."""
    prompts: str = "eval_prompts"
    judge: Literal["auto", "gold", "reward"] = "auto"
    """Who says which of two answers wins: the embedded world's gold reward, or `reward`. `auto`: gold for synthetic prompts."""
    sampling: Sampling = Sampling()
    seed: int = 0


class Sweep(Section):
    """One model many times; the sweep's name is a target, `results/runs/<sweep>/` has its points, the report a table."""

    model: str
    """The model that is varied. What it is made from is shared by all points."""
    grid: dict[str, list[Any]] = {}
    """Option of the model (`kl_coef`, `actor.learning_rate`) -> its values; all combinations are taken."""
    variants: dict[str, dict[str, Any]] = {}
    """Name -> options that it changes; each is combined with the grid."""
    seeds: list[int] = []
    """Seeds of the model; the table gives means and standard errors over them. Empty: the model's own."""

    @model_validator(mode="after")
    def _varies(self):
        if not (self.grid or self.variants or self.seeds):
            raise ValueError("grid, variants and seeds are all empty: nothing would vary")
        empty = [key for key, values in self.grid.items() if not values]
        if empty:
            raise ValueError(f"grid.{empty[0]}: no values")
        return self


class Engines(Section):
    """vLLM engines, each a Ray actor; prompts are spread over them."""

    count: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    threads: PositiveInt = 2
    """CPU threads of one engine."""
    max_num_seqs: PositiveInt = 256
    """Prompts that an engine answers at the same time; each that ends makes room for the next."""
    max_model_len: PositiveInt = 4096
    """Longest prompt plus response of an engine, if the model's own context is longer."""
    kv_cache_mb: PositiveInt = 64
    """Size of the key-value cache of one engine on CPUs."""
    gpu_memory: Fraction = 0.4
    """Part of a GPU's memory that one engine takes."""
    colocate: bool = True
    """Engines share the GPUs of the trainers; otherwise they have their own."""


class Hardware(Section):
    """Where and how the work runs. Nothing here is part of an artifact's identity."""

    ranks: PositiveInt = 2
    """Processes of each trainer group, one GPU each where there are GPUs."""
    threads: PositiveInt = 1
    """CPU threads of one trainer rank."""
    zero_stage: Annotated[Literal[1, 2, 3], BeforeValidator(lambda v: int(v) if str(v).isdigit() else v)] = 2
    """DeepSpeed ZeRO: 1 shards the optimizer, 2 also gradients, 3 also parameters. One rank alone shards nothing under 1 and 2."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory (ZeRO on GPUs)."""
    micro_batch_tokens: PositiveInt = 1024
    """Most tokens of one forward and backward pass on one rank."""
    recompute: bool = False
    """Trainers keep no activations inside of the model's blocks and compute them again in the backward pass (gradient
    checkpointing): less memory for another forward pass. Without effect on what comes out."""
    compile: bool = False
    """Trainers compile the model's blocks with torch.compile (a C++ compiler on CPUs, Triton on GPUs): a training step takes about
    a fifth less time, but the first on a machine waits half a minute for it, and the first of every process some seconds."""
    pack_length: NonNegativeInt = 0
    """Sequences are packed into rows of this many tokens; 0 gives each its own row."""
    colocate: list[list[Literal["actor", "critic", "reference", "reward"]]] = [["actor", "critic", "reference", "reward"]]
    """Which roles share a trainer group (and its processes); each inner list is one group."""
    engines: Engines = Engines()

    @model_validator(mode="after")
    def _each_role_once(self):
        roles = [role for group in self.colocate for role in group]
        if sorted(roles) != ["actor", "critic", "reference", "reward"]:
            raise ValueError("colocate: name each of actor, critic, reference, reward exactly once")
        return self

    @model_validator(mode="after")
    def _whole_blocks(self):
        if self.compile and self.zero_stage == 3:
            raise ValueError("compile: zero_stage 3 gathers parameters inside of a block, which cannot be compiled then; take 1 or 2")
        return self


class Cluster(Section):
    """The Ray cluster."""

    address: str = "local"
    """`local`: a head of our own on this machine, started on demand; or HOST:PORT of one that runs."""
    port: NonNegativeInt = 0
    """Port of the local head; 0 takes a free one."""
    idle_minutes: PositiveInt = 30
    """The local head stops after so many minutes without work."""


class Config(Section):
    """The whole configuration."""

    experiment: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the folder of links under results/runs/."""
    code_policy: Literal["strict", "version"] = "strict"
    """`strict`: changed code of a stage changes its key; `version`: only its declared version does."""
    data: dict[str, Data]
    models: dict[str, Model]
    evaluation: Evaluation = Evaluation()
    sweeps: dict[str, Sweep] = {}
    hardware: Hardware = Hardware()
    cluster: Cluster = Cluster()
