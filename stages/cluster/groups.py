"""The driver's side: trainer groups and engines found warm or made, asked all at once, watched, and rebuilt when one dies."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from stages.cluster import saved_state
from stages.cluster.actors import actor_name, get_or_create
from stages.cluster.engine import Engine
from stages.cluster.placement import gpus, placement
from stages.cluster.recipe import Recipe, Source
from stages.cluster.rows import Rows
from stages.cluster.trainer import TrainerRank
from stages.errors import UserError

_ATTEMPTS = 3
_LOOK_S = 0.5
"""How often running engines are asked for what they have."""
_DEATH_S = 5.0
"""How long after one rank failed Ray may take to say that another has died."""
_MAKING = threading.Lock()
_USING: dict[str, threading.RLock] = defaultdict(threading.RLock)
"""One job at a time on a group or on the engines: calls of two jobs in another order on each rank would never meet."""


class GroupDied(Exception):
    """A process of a group is gone; the group has been taken down, to be made again."""


def _environment(threads: int) -> dict[str, str]:
    """Of every process of ours that computes: as many OpenMP threads as planned, and none that spins."""
    return {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error", "RAY_DEDUP_LOGS": "0",
    }  # fmt: skip


class TrainerGroup:
    """All ranks of one group. `roles` share its processes; another number of ranks or threads is another group."""

    def __init__(self, index: int, roles: Sequence[str], runtime: dict[str, Any], before: Callable[[], None] = lambda: None):
        h, self.before = runtime["hardware"], before
        self.code_id, self.hardware, self.roles = runtime["code_id"], h, roles
        self.name = f"trainer-{index}"
        self.every = [[f"trainer-{i}.{rank}-{_settings(h)}" for rank in range(h["ranks"])] for i in range(len(h["colocate"]))]
        self.names = self.every[index]
        self.ranks: list[Any] = []

    def start(self) -> TrainerGroup:
        """The group, found alive and joined, or made anew. Raises GroupDied when some of its ranks are gone."""
        h, environment = self.hardware, _environment(self.hardware["threads"])
        with _MAKING:
            _remove_others("trainer-", [name for names in self.every for name in names], self.code_id)
            self.ranks = [
                get_or_create(
                    name, TrainerRank, code_id=self.code_id, env=environment, options=placement(h, rank, self.code_id), before=self.before,
                    kwargs={"name": self.name, "code_id": self.code_id, "rank": rank, "world": h["ranks"], "hardware": h,
                            "environment": environment},
                )
                for rank, name in enumerate(self.names)
            ]  # fmt: skip
            try:
                joined = ray.get([rank.joined.remote() for rank in self.ranks], timeout=120)
                if len(set(joined)) > 1:  # some ranks were dead: a group lives and dies as one
                    self.stop()
                    raise GroupDied(self.name)
                if joined[0] is None:
                    address = ray.get(self.ranks[0].address.remote(), timeout=120)
                    ray.get([rank.join.remote(address) for rank in self.ranks], timeout=300)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self.stop()
                raise GroupDied(f"{self.name}: {str(error).splitlines()[0]}") from None
        return self

    def stop(self) -> None:
        for name in self.names:
            _remove(actor_name(name, self.code_id))
        self.ranks = []

    def ask(self, method: str, *args, watch: Callable[[dict], None] | None = None, cancelled: threading.Event | None = None, **kwargs):
        """The results of a method on every rank; `watch` sees rank 0's progress; a dead rank takes the group down."""
        calls = [getattr(rank, method).remote(*args, **kwargs) for rank in self.ranks]
        waiting = list(calls)
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
                ray.get(ready)
                if waiting and watch:
                    watch(ray.get(self.ranks[0].progress.remote(), timeout=30))
                if waiting and cancelled is not None and cancelled.is_set():
                    ray.get([rank.cancel.remote() for rank in self.ranks], timeout=30)
            return ray.get(calls)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self.stop()
            raise GroupDied(f"{self.name}: {str(error).splitlines()[0]}") from None
        except ray.exceptions.RayTaskError as error:
            died = _any_died(calls)  # the others fail in a collective before Ray says that one is gone
            self.stop()  # the other ranks may wait in a collective for one that has failed
            if died:
                raise GroupDied(f"{self.name}: {died}") from None
            raise _plain(error) from None


class Groups:
    """The cluster as a stage sees it. `context` is the runner's."""

    def __init__(self, context):
        self.context, self.runtime = context, context.runtime
        self._trained: dict[str, str] = {}
        """Role -> name of what this job trained last for it."""

    def _group(self, role: str) -> TrainerGroup:
        for index, roles in enumerate(self.runtime["hardware"]["colocate"]):
            if role in roles:
                return TrainerGroup(index, roles, self.runtime, self.context.check_code)
        raise KeyError(role)

    def _with_group(self, role: str, work: Callable[[TrainerGroup], Any]) -> Any:
        """Work on a live group; one that dies in the middle is made again, and the work resumes from its saved state."""
        for attempt in range(_ATTEMPTS):
            group = self._group(role)
            try:
                with _USING[group.name]:
                    return work(group.start())
            except GroupDied as error:
                self.context.check()
                if attempt + 1 == _ATTEMPTS:
                    raise RuntimeError(f"trainer group died {_ATTEMPTS} times: {error}") from None
                self.context.log(f"a trainer process died ({error}); the group starts again from its last saved state")

    def apply(self, function: str, **arguments) -> Any:
        """`stages.module:function` on a process that has torch and transformers loaded."""
        return self._with_group("actor", lambda group: _first(group, function, arguments))

    def train(self, role: str, source: Source, rows: Rows, recipe: Recipe, phase: str, *, folder: Path,
              tokenizer_from: Path, optimizer_to: Path | None = None, companion: Rows | None = None,
              mixed: Rows | None = None) -> dict[str, Any]:  # fmt: skip
        """Train a role and write it as a Hugging Face folder; its weights stay warm in the group.

        optimizer_to: files for the optimizer's state, without `.safetensors`. companion, mixed: see TrainerRank.train. Raises
        runner.Cancelled when the client has gone; what was trained until then is in recipe.state.
        """
        from stages.runner import Cancelled

        context = self.context

        def watch(progress: dict) -> None:
            if progress:
                context.progress(phase, progress["done"], progress["total"], tokens_per_s=progress["tokens_per_s"], **progress["metrics"])

        token = self._trained[role] = f"{source.state_id}+{uuid.uuid4().hex}"

        def work(group: TrainerGroup):
            if recipe.state and (reached := saved_state.reached(recipe.state)) is not None:
                state = saved_state.latest(recipe.state)
                step = saved_state.step(state) if state else 0
                context.resumed(phase, step, reached - step, "steps")
            with context.phase("training"):
                done = group.ask(
                    "train", role, source, ray.put(rows), recipe, companion, mixed, token, watch=watch, cancelled=context.cancelled
                )[0]
            if not done["cancelled"]:
                with context.phase("writing"):
                    group.ask("save", role, str(folder), str(tokenizer_from), str(optimizer_to) if optimizer_to else None)
            return done

        done = self._with_group(role, work)
        if done["cancelled"]:
            raise Cancelled()
        context.info.setdefault("pace", {})[role] = done["pace"]
        last = {name: value for step, name, value in done["metrics"][-40:]}
        context.progress(phase, done["steps"], done["steps"], loss=last.get("loss", 0.0))
        return done

    def apart(self, one: str, other: str) -> bool:
        """Whether two roles have processes of their own."""
        return self._group(one).name != self._group(other).name

    def rename(self, role: str, state_id: str) -> None:
        """What this job trained for a role is now an artifact's. Without effect where another job has trained since."""
        group = self._group(role)
        try:
            with _USING[group.name]:
                group.start().ask("rename", role, state_id, self._trained.get(role))
        except GroupDied as error:
            self.context.log(f"nothing stays warm: a trainer process died ({error})")

    def score(self, role: str, source: Source, rows: Rows, **options) -> list[Any]:
        """Outputs at the chosen tokens, one float32 array per sequence, in the order of rows; (outputs, statistic) where one is asked."""
        shares = self._with_group(role, lambda group: group.ask("score", role, source, ray.put(rows), **options))
        found: list[Any] = [None] * (len(rows) * rows.per_row)
        for indexes, values in shares:
            for i, row in enumerate(indexes):
                found[row * rows.per_row : (row + 1) * rows.per_row] = values[i * rows.per_row : (i + 1) * rows.per_row]
        if any(v is None for v in found):
            raise RuntimeError(f"{role}: {sum(v is None for v in found)} sequences were not scored")
        return found

    # -- engines ------------------------------------------------------------------------------------------------------

    def _engines(self) -> list[Any]:
        h = self.runtime["hardware"]
        e = h["engines"]
        environment = _environment(e["threads"]) | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        }  # fmt: skip
        if not gpus():
            environment["TORCHDYNAMO_DISABLE"] = "1"  # compiling the sampler for a CPU costs 18 s once and gains nothing
        else:
            environment["TRITON_F32_DEFAULT"] = "ieee"  # with TF32 in attention, float32 log-probabilities are off by 4e-3
        code_id = self.runtime["code_id"]
        names = [f"engine-{index}-{_settings(e)}" for index in range(e["count"])]
        with _MAKING:
            _remove_others("engine", names, code_id)
            return [
                get_or_create(
                    name, Engine, code_id=code_id, env=environment, options=placement(h, index, code_id, engine=True),
                    before=self.context.check_code,
                    kwargs={"name": f"engine-{index}", "code_id": code_id, "settings": e, "environment": environment},
                )
                for index, name in enumerate(names)
            ]  # fmt: skip

    def generate(self, state_id: str, folder: Path, precision: str, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *,
                 temperature: float, max_tokens: int, stop: list[int], phase: str,
                 greedy: Sequence[Sequence[int]] = (), greedy_tokens: int = 0,
                 finished: dict[int, tuple] | None = None, keep: Callable[[dict[int, tuple]], None] | None = None,
                 asking: Callable[[int], None] | None = None):  # fmt: skip
        """(ids, log-probabilities, finish reason) for each prompt, in order, over all engines; then for each of `greedy`.

        greedy: prompts to answer with the likeliest tokens, `greedy_tokens` at most, beside the others.
        finished: results by prompt index that a killed run had kept; keep: called with the new ones about twice a second;
        asking: with the number of prompts that are begun or done.
        An engine that dies is started again, and its unfinished prompts are asked again: seeds make them come out the same.
        """
        context, found = self.context, dict(finished or {})
        asked = [(list(p), int(seed), temperature, max_tokens) for p, seed in zip(prompts, seeds)]
        asked += [(list(p), 0, 0.0, greedy_tokens) for p in greedy]
        for attempt in range(_ATTEMPTS):
            engines = self._engines()
            try:
                with _USING["engines"]:
                    with context.phase("weight sync"):
                        how = ray.get([e.load.remote(state_id, str(folder), precision) for e in engines], timeout=600)
                    context.info.setdefault("weight_sync", []).append(how)
                    with context.phase("generation"):
                        began, tokens, told = time.perf_counter(), 0, -1
                        done = sum(i < len(prompts) for i in found)
                        for begun, new in self._answers(engines, state_id, [(i, *a) for i, a in enumerate(asked) if i not in found], stop):
                            found |= new
                            tokens += sum(len(r[0]) for r in new.values())
                            if asking and told != min(done + begun, len(prompts)):
                                told = min(done + begun, len(prompts))
                                asking(told)
                            if keep and (sampled := {i: r for i, r in new.items() if i < len(prompts)}):
                                keep(sampled)
                            speed = tokens / (time.perf_counter() - began)
                            context.progress(phase, sum(i < len(prompts) for i in found), len(prompts), unit="prompt", tokens_per_s=speed)
                context.info.setdefault("pace", {}).setdefault(phase, {"tokens_per_s": tokens / max(time.perf_counter() - began, 1e-9)})
                if len(found) == len(asked):
                    return [found[i] for i in range(len(asked))]
                if attempt + 1 == _ATTEMPTS:
                    raise RuntimeError(
                        f"the engines were not asked for a minute and gave up, {_ATTEMPTS} times; is this machine overloaded?"
                    )
                context.log("the engines were not asked for a minute and gave up; what is left is asked again")
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                _end(engines)
                if attempt + 1 == _ATTEMPTS:
                    raise RuntimeError(f"an engine died {_ATTEMPTS} times: {str(error).splitlines()[0]}") from None
                context.log("an engine died; it starts again and the unfinished prompts are asked again")
            except ray.exceptions.RayTaskError as error:
                _end(engines)  # after an error on a GPU it would answer nothing but errors
                raise _plain(error) from None

    def _answers(self, engines: list[Any], state_id: str, asked: list[tuple], stop: list[int]):
        """(Prompts begun or done, new results by index), again and again until all are there. Each engine has its share at once."""
        token = uuid.uuid4().hex
        calls = [e.generate.remote(state_id, asked[n :: len(engines)], stop=stop, token=token) for n, e in enumerate(engines)]
        try:
            waiting = list(calls)
            while waiting:
                ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_LOOK_S)
                new = [answer for share in ray.get(ready) for answer in share]
                begun = [len(asked[n :: len(engines)]) for n in range(len(engines))]
                working = [n for n, call in enumerate(calls) if call in waiting]
                for n, (count, some) in zip(working, ray.get([engines[n].collect.remote(token) for n in working], timeout=120)):
                    begun[n], new = count, new + some
                yield sum(begun), dict(new)
                self.context.check()
        finally:
            for engine in engines:
                engine.cancel.remote(token)

    def warm_up(self) -> None:
        """Start the trainer groups and engines while nothing needs them yet."""
        try:
            for index, roles in enumerate(self.runtime["hardware"]["colocate"]):
                TrainerGroup(index, roles, self.runtime, self.context.check_code).start()
            for engine in self._engines():
                engine.warm.remote()
        except GroupDied:
            return  # the first job that needs the group makes it


def source(
    context, name: str, kind: str, *, role: str = "actor", precision: str = "float32", seed: int = 0, optimizer: str | None = None
) -> Source:
    """The weights of an input artifact."""
    return Source(context.state_id(name, role), str(context.model_folder(name, role)), kind, precision, seed, optimizer)


def _end(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _any_died(calls: list[Any]) -> str:
    """What Ray says of a call whose process is gone, or nothing."""
    for call in ray.wait(calls, num_returns=len(calls), timeout=_DEATH_S)[0]:
        try:
            ray.get(call)
        except ray.exceptions.RayActorError as error:
            return str(error).splitlines()[0]
        except ray.exceptions.RayError:
            pass
    return ""


def _first(group: TrainerGroup, function: str, arguments: dict) -> Any:
    try:
        return ray.get(group.ranks[0].apply.remote(function, **arguments))
    except ray.exceptions.RayActorError as error:
        group.stop()
        raise GroupDied(str(error).splitlines()[0]) from None
    except ray.exceptions.RayTaskError as error:
        raise _plain(error) from None


def _plain(error: ray.exceptions.RayTaskError) -> Exception:
    """What the remote code raised; a UserError stays one, and a full disk stays an OSError, whoever noticed it."""
    cause = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        cause = cause.cause
    full = os.strerror(errno.ENOSPC)
    if full in str(error):
        return OSError(errno.ENOSPC, full)
    return cause if isinstance(cause, UserError) else RuntimeError(str(error))


def _settings(section: dict) -> str:
    from stages.plan import short_hash

    return short_hash(section)[:6]


def _remove_others(prefix: str, names: Sequence[str], code_id: str) -> None:
    """End the actors of a kind that were made for other settings: two of them would not fit."""
    ours = {actor_name(name, code_id) for name in names}
    for name in ray.util.list_named_actors():
        if name.startswith(prefix) and name.endswith(code_id[:12]) and name not in ours:
            _remove(name)


def _remove(name: str) -> None:
    with contextlib.suppress(ValueError):  # it has gone by itself
        ray.kill(ray.get_actor(name))
