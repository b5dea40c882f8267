"""From a configuration to artifacts: what depends on what, under which identity, in which folder.

A plan id names what is wanted (stage, version, effective parameters, data pins, upstream plan ids); nothing of code,
hardware or time is in it. Folders are `results/store/<model>-<plan id>/`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stages import fingerprint, manifest
from stages.config import Config
from stages.config_data import Data
from stages.errors import UserError
from stages.sources import is_function, is_model

STORE = "results/store"


@dataclass(frozen=True)
class Stage:
    """What the workflow knows of a stage: where its code is, what it leaves, which packages its numbers depend on."""

    module: str
    version: int
    outputs: tuple[str, ...]
    packages: tuple[str, ...] = ()

    @property
    def code(self) -> tuple[str, ...]:
        """Modules whose import closures make the stage's result; what computes with packages does it on the cluster."""
        return (self.module, *(("stages.cluster.groups",) if self.packages else ()))


_TRAINING = ("torch", "transformers", "tokenizers", "deepspeed", "accelerate", "numpy")
STAGES = {
    "data": Stage("stages.data", 1, ("data.arrow",)),
    "import": Stage("stages.import_model", 1, ()),
    "pretrain": Stage("stages.pretrain", 1, ("metrics.arrow",), _TRAINING),
    "sft": Stage("stages.sft", 1, ("metrics.arrow",), _TRAINING),
    "reward_model": Stage("stages.reward_model", 1, ("metrics.arrow", "heldout.arrow"), _TRAINING),
    "condition": Stage("stages.condition", 1, ("data.arrow",), _TRAINING),
    "reference": Stage("stages.reference", 1, ("reference.arrow",), _TRAINING),
    "dpo": Stage("stages.dpo", 1, ("metrics.arrow",), _TRAINING),
    "kto": Stage("stages.kto", 1, ("metrics.arrow",), _TRAINING),
    "selection": Stage("stages.selection", 1, ("data.arrow", "scores.arrow"), _TRAINING),
    "rollouts": Stage("stages.rollouts", 1, ("rollouts.arrow",), ("torch", "vllm", "transformers", "tokenizers")),
    "experience": Stage("stages.experience", 1, ("experience.arrow", "metrics.arrow"), _TRAINING),
    "update": Stage("stages.update", 1, ("metrics.arrow",), _TRAINING),
    "evaluate": Stage("stages.evaluate", 1, ("samples.arrow", "summary.json"), ("vllm", *_TRAINING)),
}


_ROLLOUTS = ("seed", "sampling", "iteration", "prompts_per_iteration", "samples_per_prompt", "precision")
_EXPERIENCE = (
    "iteration", "precision", "sampling", "rewards", "estimator", "filter_groups", "kl_coef", "kl_estimator", "kl_target", "kl_horizon",
    "reward_normalisation", "reward_clip", "truncation_penalty", "gamma", "lam", "whiten_advantages",
)  # fmt: skip
_BOTH = ("seed", "sampling", "iteration", "precision")
"""Which options of a PPO model each of its stages reads; an update reads the rest, and of those above only these."""


def canonical(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def short_hash(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Node:
    """One artifact to be: `inputs` are nodes too; `hints` steer the work without changing the result."""

    stage: str
    model: str
    params: dict[str, Any]
    inputs: dict[str, Node] = field(default_factory=dict)
    folder: str = ""
    """Path under results/store; empty: `<model>-<plan id>`."""
    hints: dict[str, Any] = field(default_factory=dict)
    policy: str = "strict"

    @cached_property
    def plan_id(self) -> str:
        return short_hash(
            {
                "stage": self.stage,
                "version": STAGES[self.stage].version,
                "params": self.params,
                "inputs": {name: node.plan_id for name, node in self.inputs.items()},
            }
        )

    @cached_property
    def path(self) -> str:
        return f"{STORE}/{self.folder or f'{self.model}-{self.plan_id}'}"

    @property
    def manifest(self) -> str:
        return f"{self.path}/manifest.json"

    @cached_property
    def job(self) -> dict[str, Any]:
        """Everything that the run needs to know."""
        stage = STAGES[self.stage]
        return {
            "stage": self.stage,
            "version": stage.version,
            "model": self.model,
            "params": self.params,
            "plan": self.plan_id,
            "code": fingerprint.fingerprint(*stage.code) if self.policy == "strict" else f"version {stage.version}",
            "inputs": {name: node.path for name, node in self.inputs.items()},
            "out": self.path,
            "hints": self.hints,
        }


class Plan:
    """All artifacts of a configuration, by folder; `final[model]` is a model's last one, `evaluations[model]` its test."""

    def __init__(self, config: Config, root: Path = Path(".")):
        self.config, self.root = config, root
        self.nodes: dict[str, Node] = {}
        self.final: dict[str, Node] = {}
        self.evaluations: dict[str, Node] = {}
        self.data_nodes: dict[str, Node] = {}
        for name in config.models:
            self._model(name)
        for name, model in config.models.items():
            if model.stage not in ("import", "pretrain", "reward_model"):
                self._evaluation(name)

    def _add(self, stage, model, params, inputs=None, folder="", hints=None) -> Node:
        node = Node(stage, model, params, inputs or {}, folder, hints or {}, self.config.code_policy)
        assert node.plan_id  # made now, while what it builds on is known: a chain of thousands must not recurse
        return self.nodes.setdefault(node.path, node)

    def data(self, name: str) -> Node:
        if name not in self.data_nodes:
            section = self.config.data[name]
            params = section.model_dump(exclude_defaults=True) | {"kind": section.kind, "source": section.source}
            if section.source == "synthetic":
                params |= {"rows": section.rows or 2000, "seed": section.seed, "split": section.split}
                if section.kind in ("preferences", "rated"):
                    params |= {"noise": section.noise}
            elif not section.source.startswith("hf:"):
                params |= {"pin": _pin(self.root, name, section)}
            if section.mixture:
                params = {"kind": section.kind, "mixture": section.mixture, "rows": section.rows, "seed": section.seed}
            self.data_nodes[name] = self._add("data", name, params, {n: self.data(n) for n in section.mixture})
        return self.data_nodes[name]

    def _model(self, name: str) -> Node:
        if name in self.final:
            return self.final[name]
        model = self.config.models[name]
        params = model.model_dump(by_alias=True)
        hints = {name: params.pop(name) for name in ("save_every", "save_minutes", "keep_optimizers") if name in params}
        if model.stage == "import":
            pins = {} if not Path(model.source).is_dir() else {"pin": _pin_folder(Path(model.source))}
            if model.template:
                if not (self.root / model.template).is_file():
                    raise UserError(f"config: models.{name}.template: no file '{model.template}'")
                pins["template_pin"] = manifest.hash_file(self.root / model.template)
            given = {"source": model.source, "revision": model.revision, "template": model.template, "pad_token": model.pad_token}
            node = self._add("import", name, given | pins)
        elif model.stage == "pretrain":
            inputs = {"texts": self.data(model.data)}
            if model.demonstrations:
                inputs["demonstrations"] = self.data(model.demonstrations)
            node = self._add("pretrain", name, _without(params, "data", "demonstrations"), inputs, hints=hints)
        elif model.stage == "sft":
            inputs = {"base": self._model(model.base), "data": self.data(model.data)}
            node = self._add("sft", name, _without(params, "from", "data"), inputs, hints=hints)
        elif model.stage == "reward_model":
            inputs = {"base": self._model(model.base), "data": self.data(model.data), "heldout": self.data(model.heldout)}
            node = self._add("reward_model", name, _without(params, "from", "data", "heldout"), inputs, hints=hints)
        elif model.stage in ("dpo", "kto"):
            base, data = self._model(model.base), self.data(model.data)
            node = self._preference(model.stage, name, _without(params, "from", "data"), base, data, base, hints)
        elif model.stage == "conditional_sft":
            labels = self._add(
                "condition",
                f"{name}_data",
                {"condition": model.condition, "levels": model.levels, "precision": model.precision},
                {"data": self.data(model.data), "reward": self._model(model.reward)},
            )
            inputs = {"base": self._model(model.base), "data": labels}
            node = self._add("sft", name, _without(params, "from", "reward", "data", "condition", "levels"), inputs, hints=hints)
        elif model.stage in ("rejection_sampling", "iterative_dpo"):
            node = self._rounds(name, model, params, hints)
        else:
            node = self._ppo(name, model, _without(params, "from", "reward", "prompts", "iterations"), hints)
        self.final[name] = node
        return node

    def _preference(self, stage, name, params, base, data, reference, hints, folder="") -> Node:
        """DPO or KTO, with the reference's log-probabilities as an artifact of their own, which other losses share."""
        logprobs = self._add(
            "reference",
            f"reference_{data.model}" if not folder else name,
            {"precision": params["precision"], "mismatched": stage == "kto"},
            {"model": reference, "data": data},
            f"{folder}/reference" if folder else "",
        )
        return self._add(
            stage, name, params, {"base": base, "data": data, "reference": logprobs}, f"{folder}/policy" if folder else "", hints
        )

    def _rounds(self, name, model, params, hints) -> Node:
        """Sample, score and choose, train; the next round samples from what this one left."""
        policy, prompts = self._model(model.base), self.data(model.prompts)
        sources, rewards = self._rewards(f"models.{name}.reward", model.reward)
        shared = _without(params, "from", "reward", "prompts", "rounds") | {"rewards": sources}
        ids = [policy.plan_id, prompts.plan_id, *(node.plan_id for node in rewards.values())]
        identity = short_hash({"params": shared, "inputs": ids})
        start = policy
        for k in range(1, model.rounds + 1):
            folder = f"{name}-{identity}/{k:04d}"
            rollouts = self._add(
                "rollouts", name,
                {"seed": model.seed, "sampling": params["sampling"], "iteration": k, "precision": model.precision,
                 "prompts_per_iteration": model.prompts_per_round, "samples_per_prompt": model.samples_per_prompt},
                {"policy": policy, "prompts": prompts}, f"{folder}/rollouts",
            )  # fmt: skip
            pairs = model.stage == "iterative_dpo"
            chosen = self._add(
                "selection",
                name,
                {"keep": "pairs" if pairs else "best", "precision": model.precision, "rewards": sources}
                | ({} if pairs else {"top_share": model.top_share}),
                {"rollouts": rollouts} | rewards,
                f"{folder}/selection",
            )
            training = {key: shared[key] for key in ("seed", "precision", "epochs", "optimizer")}
            if pairs:
                training |= {"loss": "sigmoid", "beta": model.beta, "label_smoothing": model.label_smoothing,
                             "robust": False, "average_logprobs": False}  # fmt: skip
                policy = self._preference(
                    "dpo", name, training, policy, chosen, start if model.reference == "fixed" else policy, hints, folder
                )
            else:
                policy = self._add("sft", name, training, {"base": policy, "data": chosen}, f"{folder}/policy", hints)
        return policy

    def _rewards(self, at: str, rewards: dict[str, float]) -> tuple[list[dict[str, Any]], dict[str, Node]]:
        """Sources as the stages read them, and the reward models among them as inputs `reward_0`, `reward_1`, ..."""
        sources, inputs = [], {}
        for source, weight in rewards.items():
            entry: dict[str, Any] = {"source": source, "weight": weight}
            if is_model(source):
                entry["input"] = f"reward_{len(inputs)}"
                inputs[entry["input"]] = self._model(source)
            elif is_function(source):
                file = source.partition(":")[0]
                if not (self.root / file).is_file():
                    raise UserError(f"config: {at}: no file '{file}'; '{source}' wants FILE.py:FUNCTION")
                entry["pin"] = manifest.hash_file(self.root / file)
            sources.append(entry)
        return sources, inputs

    def _ppo(self, name, model, params, hints) -> Node:
        reference, prompts = self._model(model.base), self.data(model.prompts)
        sources, rewards = self._rewards(f"models.{name}.reward", model.reward)
        if model.estimator != "gae":
            params = _without(params, "critic", "critic_init", "lam", "value_clip")
        params = _without(params, "ptx_data") | {"rewards": sources}
        mixed = {"ptx": self.data(model.ptx_data)} if model.ptx_data else {}
        upstream = {"reference": reference, "prompts": prompts, **rewards, **mixed}
        identity = short_hash({"params": params, "inputs": {name: node.plan_id for name, node in upstream.items()}})
        start = rewards["reward_0"] if model.critic_init == "reward" and rewards else reference
        critic = {"critic": start} if model.estimator == "gae" else {}
        carries = model.kl_target is not None or model.reward_normalisation == "running"
        actor, before, last = reference, {}, {}
        for k in range(1, model.iterations + 1):
            step = {**params, "iteration": k}
            folder = f"{name}-{identity}/{k:04d}"
            rollouts = self._add(
                "rollouts", name, {key: step[key] for key in _ROLLOUTS}, {"policy": actor, "prompts": prompts}, f"{folder}/rollouts"
            )
            experience = self._add(
                "experience",
                name,
                {key: step[key] for key in _EXPERIENCE if key in step},
                {"rollouts": rollouts, "actor": actor, "reference": reference} | rewards | critic | last,
                f"{folder}/experience",
            )
            update = self._add(
                "update",
                name,
                {key: value for key, value in step.items() if key not in (*_EXPERIENCE, *_ROLLOUTS) or key in _BOTH},
                {"experience": experience, "actor": actor} | critic | before | mixed,
                f"{folder}/update",
                hints,
            )
            actor, before = update, {"previous": update}
            critic = {"critic": update} if critic else {}
            last = {"last": experience} if carries else {}
        return actor

    def _evaluation(self, name: str) -> Node:
        if name in self.evaluations:
            return self.evaluations[name]
        e = self.config.evaluation
        inputs = {
            "policy": self._model(name),
            "reference": self._model(e.baseline),
            "prompts": self.data(e.prompts),
        }
        sources, rewards = self._rewards("evaluation.reward", e.reward)
        inputs |= rewards
        if name != e.baseline:
            inputs["baseline"] = self._evaluation(e.baseline)
        model = self.config.models[name]
        judge = "gold" if self.config.data[e.prompts].source == "synthetic" else "reward"
        params = {"sampling": e.sampling.model_dump(), "seed": e.seed, "precision": getattr(model, "precision", "float32"),
                  "rewards": sources, "judge": judge if e.judge == "auto" else e.judge}  # fmt: skip
        if model.stage == "conditional_sft":
            params["condition"] = model.condition.replace("{level}", str(model.levels))
        node = self._add("evaluate", f"evaluation-{name}", params, inputs)
        self.evaluations[name] = node
        return node

    @cached_property
    def pointers(self) -> dict[str, Node]:
        """Name -> the artifact that DVC tracks under it: `<model>-<plan id>`, and `<model>-<plan id>.evaluation` beside it.

        A PPO run keeps its names as it grows.
        """
        name = lambda node: node.path.removeprefix(f"{STORE}/").split("/")[0]
        found = {name(node): node for node in self.final.values() if node.stage != "import"}
        return found | {f"{name(self.final[model])}.evaluation": node for model, node in self.evaluations.items()}

    def closure(self, *nodes: Node) -> dict[str, Node]:
        """The nodes and everything upstream of them, by folder, inputs before what is made from them."""
        found: set[str] = set()
        waiting = list(nodes)
        while waiting:
            at = waiting.pop()
            if at.path not in found:
                found.add(at.path)
                waiting += at.inputs.values()
        return {path: node for path, node in self.nodes.items() if path in found}


def model_folder(path: str, role: str = "actor") -> str:
    """Where in an artifact the weights of a role lie: `model/`, or `critic/` for the critic of a PPO update of the same run."""
    return f"{path}/{'critic' if role == 'critic' else 'model'}"


def _without(params: dict, *keys: str) -> dict:
    return {k: v for k, v in params.items() if k not in keys and k != "stage"}


def _pin(root: Path, name: str, section: Data) -> str:
    path = root / section.source
    if path.is_dir():
        return short_hash(manifest.hash_tree(path))
    if not path.is_file():
        raise UserError(f"config: data.{name}.source: no file '{section.source}'; give an existing file, 'synthetic' or 'hf:NAME'")
    return manifest.hash_file(path)


def _pin_folder(folder: Path) -> str:
    """Names, sizes, and the first and last megabyte of each file: weights may be hundreds of gigabytes; the import hashes it all."""
    entries = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(2**20))
            file.seek(max(0, size - 2**20))
            digest.update(file.read())
        entries.append([str(path.relative_to(folder)), size, digest.hexdigest()])
    return short_hash(entries)
