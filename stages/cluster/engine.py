"""A vLLM engine as a Ray actor: token ids in, token ids and log-probabilities out; its weights are named and proven."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import ray

from stages.cluster.actors import Resident

Answer = tuple[list[int], list[float], str]
_ABANDONED_S = 60.0


class Engine(Resident):
    """One engine (in process; `tensor_parallel` GPUs). It holds the weights of one policy at a time."""

    def __init__(self, *, name: str, code_id: str, settings: dict[str, Any], environment: dict[str, str]):
        super().__init__(role=name, code_id=code_id)
        os.environ.update(environment)
        self.settings, self.llm, self._made_for = settings, None, None
        self._token = self._cancelled = ""

    def warm(self) -> None:
        """Import vLLM, which takes longer than starting an engine."""
        import vllm  # noqa: F401

    def load(self, state_id: str, folder: str, precision: str) -> dict[str, Any]:
        """Hold the weights of a Hugging Face folder: start an engine for its architecture, or reload in place.

        Nothing computed under other weights survives: the prefix cache is emptied. Returns {seconds, how}.
        """
        import json

        began = time.perf_counter()
        config = json.loads(Path(folder, "config.json").read_text())
        shape = (precision, json.dumps({k: v for k, v in config.items() if not k.startswith("_")}, sort_keys=True))
        if self.llm is not None and self._made_for == shape and self.holds.get("policy") == state_id:
            return {"seconds": time.perf_counter() - began, "how": "held"}
        if self.llm is None or self._made_for != shape:
            self._start(folder, precision, config)
            self._made_for, how = shape, "started"
        else:
            self.release("policy")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            self.llm.collective_rpc(_refresh_tied_head)
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM keeps a cache of the weights before")
            how = "reloaded"
        self.hold("policy", state_id)
        return {"seconds": time.perf_counter() - began, "how": how}

    def _start(self, folder: str, precision: str, config: dict) -> None:
        import gc

        import torch
        from vllm import LLM

        self.release("policy")
        self.llm = None
        gc.collect()
        s = self.settings
        memory = (
            {"gpu_memory_utilization": s["gpu_memory"]} if torch.cuda.is_available() else {"kv_cache_memory_bytes": s["kv_cache_mb"] << 20}
        )
        length = int(config.get("max_position_embeddings") or 4096)
        self.llm = LLM(
            folder, skip_tokenizer_init=True, dtype=precision, enforce_eager=not torch.cuda.is_available(),
            tensor_parallel_size=s["tensor_parallel"], max_num_seqs=s["max_num_seqs"], max_model_len=min(length, s["max_model_len"]),
            max_num_batched_tokens=max(8192, min(length, s["max_model_len"])), logprobs_mode="processed_logprobs",
            disable_log_stats=True, trust_remote_code=False, seed=0, **memory,
        )  # fmt: skip

    def generate(
        self, state_id: str, asked: list[tuple[int, list[int], int, float, int]], *, stop: list[int], token: str
    ) -> list[tuple[int, Answer]]:
        """Answer all of (index, prompt ids, seed, temperature, most tokens): (index, answer) of each, but for what was collected.

        An answer is (response ids with their end-of-text, log-probabilities at the temperature, finish reason). Each prompt has
        its own seed, so tokens do not depend on batch, order or engine; temperature 0 is greedy. `max_num_seqs` are answered at a
        time, and each that ends makes room for the next. token: names this call for `collect` and `cancel`; where nobody
        collects for a minute, the asker is gone, and the rest is not answered.
        Raises RuntimeError when the engine does not hold `state_id`.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self.holds.get("policy") != state_id:
            raise RuntimeError(f"engine holds {self.holds.get('policy')}, not {state_id}")
        engine, waiting, begun = self.llm.llm_engine, deque(asked), {}
        self._answered, self._begun, self._collected, self._token = SimpleQueue(), 0, time.monotonic(), token
        with self.working("generation"):
            try:
                while (waiting or begun) and token != self._cancelled and time.monotonic() - self._collected < _ABANDONED_S:
                    while waiting and len(begun) < self.settings["max_num_seqs"]:
                        index, prompt, seed, temperature, max_tokens = waiting.popleft()
                        sampling = SamplingParams(
                            temperature=temperature, max_tokens=max_tokens, seed=seed, logprobs=0, stop_token_ids=stop, ignore_eos=True,
                            detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY,
                        )  # fmt: skip
                        engine.add_request(f"{token}/{index}", {"prompt_token_ids": prompt}, sampling)
                        begun[f"{token}/{index}"] = index
                        self._begun += 1
                    for output in engine.step():
                        if output.finished:
                            made = output.outputs[0]
                            ids = list(made.token_ids)
                            logprobs = [float(step[token_id].logprob) for step, token_id in zip(made.logprobs, ids)]
                            self._answered.put((begun.pop(output.request_id), (ids, logprobs, made.finish_reason)))
            finally:
                engine.abort_request(list(begun))
        return self.collect(token)[1]

    @ray.method(concurrency_group="control")
    def collect(self, token: str) -> tuple[int, list[tuple[int, Answer]]]:
        """(How many prompts of that call are begun or done, the answers since the last time)."""
        if token != self._token:
            return 0, []
        self._collected = time.monotonic()
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._answered.get_nowait())
        return self._begun, found

    @ray.method(concurrency_group="control")
    def cancel(self, token: str) -> None:
        """End that call after its present step, or as soon as it begins."""
        self._cancelled = token


def _refresh_tied_head(worker) -> None:
    """A head tied to the embeddings gets no weights of its own on reload, and on a CPU keeps a packed copy of the old ones."""
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None and worker.vllm_config.model_config.hf_config.tie_word_embeddings:
        method.process_weights_after_loading(head)
