"""Hugging Face models seen through their chosen tokens only: loading, one forward for all work, saving (torch side)."""

from __future__ import annotations

import contextlib
import functools
import shutil
import types
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from stages.algorithms.logprobs import entropy, token_logprobs
from stages.algorithms.objectives.base import MicroBatch
from stages.algorithms.packing import pack
from stages.cluster import shards
from stages.cluster.rows import Rows
from stages.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ROWS_AT_A_TIME = 2048
_UNREADABLE = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Network(nn.Module):
    """A causal model or a scorer. Logits are made for the selected slots only: never R * C * V of them."""

    def __init__(self, inner: nn.Module, kind: str):
        super().__init__()
        self.inner, self.kind = inner, kind
        self.config = inner.config

    def forward(self, input_ids_RC: Tensor, position_ids_RC: Tensor, select_N: Tensor, targets_N: Tensor,
                temperature: float, statistic: str | None = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Outputs at select_N, indexes into the R * C slots: log-probabilities of targets_N, or values of a scorer.

        statistic: `entropy` of each prediction (`trained entropy`: with its gradient), or `regret`, how far below the best
        log-probability the target's is.
        """
        hidden_RCD = self.inner.base_model(
            input_ids=input_ids_RC, position_ids=position_ids_RC, attention_mask=None, use_cache=False
        ).last_hidden_state
        hidden_ND = hidden_RCD.flatten(0, 1).index_select(0, select_N)
        if self.kind == "scorer":
            return self.inner.score(hidden_ND).squeeze(-1).float(), None
        logits_NV = self.inner.get_output_embeddings()(hidden_ND)
        found_N = None
        logprobs_N = _in_parts(lambda logits, targets: token_logprobs(logits, targets, temperature=temperature), logits_NV, targets_N)
        with torch.set_grad_enabled(statistic == "trained entropy" and torch.is_grad_enabled()):
            if statistic in ("entropy", "trained entropy"):
                found_N = _in_parts(lambda logits: entropy(logits, temperature=temperature), logits_NV)
            elif statistic == "regret":
                found_N = (logits_NV.amax(dim=-1).float() - logits_NV.gather(-1, targets_N[:, None])[:, 0].float()) / temperature
        return logprobs_N, found_N


def _in_parts(function, *tensors: Tensor) -> Tensor:
    """function over rows, some at a time: the float32 copies of logits that it makes do not outlive them.

    The backward pass makes them again. No collective is in it: ranks may have different numbers of parts.
    """
    parts = list(zip(*(tensor.split(_ROWS_AT_A_TIME) for tensor in tensors)))
    if len(parts) == 1:
        return function(*parts[0])
    if torch.is_grad_enabled():
        function = functools.partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([function(*part) for part in parts])


def load(folder: str, kind: str, *, precision: str, seed: int, partition=None) -> Network:
    """A network with the weights of a Hugging Face folder, in eval mode: dropout is off, in training too.

    kind: causal or scorer; a causal folder opened as scorer gets a new head from `seed` (std 1/sqrt(width + 1)).
    partition: context under which ZeRO-3 shards the weights while they load.
    """
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    odd = [name for name in _UNREADABLE if getattr(text, name, None) not in (None, 1.0)]
    if odd and kind == "causal":
        raise UserError(f"{folder}: models with {odd[0]} are not supported; their logits need it after the head")
    new_head = kind == "scorer" and not any("SequenceClassification" in a for a in config.architectures or [])
    torch.manual_seed(seed)
    options = {"dtype": DTYPES[precision], "attn_implementation": "sdpa"}
    with partition or contextlib.nullcontext():
        if kind == "scorer":
            inner = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **options)
        else:
            inner = AutoModelForCausalLM.from_pretrained(folder, **options)
    if new_head:
        initialise_head(inner, seed)
    return Network(inner, kind).eval()


def compile_blocks(network: Network) -> None:
    """Compile the blocks that the model repeats: once for all of them, and for all models of this architecture in this process.

    Every size stays a symbol of its own, so that what a micro-batch gives does not depend on those before it. [V: on CPUs; on
    GPUs, Inductor splits some sums by the sizes that it saw first.]
    """
    import torch._inductor.config as inductor
    import torch.fx.experimental._config as shapes

    inductor.compile_threads = 1  # here, not in helpers that would stay and take memory
    inductor.deterministic = True
    shapes.use_duck_shape = False  # two sizes that happen to be equal are two sizes
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of going on without, with other roundings
    for block in _blocks(network, "compile"):
        block.forward = types.MethodType(_compiled(type(block)), block)


def recompute_blocks(network: Network) -> None:
    """Keep only what goes into each block, and compute the block again in the backward pass. Chen et al. 2016.

    Done here and not by Transformers, which does it only in training mode, where some models' blocks have dropout.
    """
    for block in _blocks(network, "recompute"):
        block.forward = functools.partial(_recomputed, block.forward)


def _recomputed(forward, *args, **kwargs):
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _blocks(network: Network, option: str) -> list[nn.Module]:
    """The blocks that the model repeats."""
    found = [module for module in network.inner.modules() if type(module).__name__ in (network.inner._no_split_modules or ())]
    if not found:
        raise UserError(f"hardware.{option}: {type(network.inner).__name__} does not say what its blocks are; set {option}: false")
    return found


@functools.cache
def _compiled(block: type[nn.Module]):
    return torch.compile(block.forward, dynamic=True)


def initialise_head(inner: nn.Module, seed: int) -> None:
    """Stiennon et al. 2020: the score starts small and the same for every number of ranks."""
    weight = inner.score.weight
    value = torch.empty(getattr(weight, "ds_shape", weight.shape), dtype=torch.float32)
    value.normal_(std=(value.shape[1] + 1) ** -0.5, generator=torch.Generator().manual_seed(seed))
    if hasattr(weight, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            weight.data.copy_(value.to(weight.dtype)) if weight.numel() else None
    else:
        weight.data.copy_(value)


def save(network: Network, tensors: dict[str, Tensor], folder: Path, tokenizer_from: str) -> None:
    """A whole Hugging Face folder: weights (of full, gathered tensors), config, generation config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = network.inner.config
    config.pad_token_id, config.eos_token_id, config.bos_token_id = (
        tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id,
    )  # fmt: skip
    network.inner.save_pretrained(folder, state_dict=tensors, max_shard_size=shards.LIMIT)
    tokenizer.save_pretrained(folder)
    for path in Path(tokenizer_from).glob("generation_config.json"):
        shutil.copyfile(path, folder / path.name)


class Collator:
    """Micro-batches as tensors: sequences padded to the longest, or packed into rows of `pack_length` tokens."""

    def __init__(self, rows: Rows, *, select: str, pack_length: int, pad_id: int, device: torch.device):
        self.rows, self.shift, self.pack_length, self.pad_id = rows, int(select == "before"), pack_length, pad_id
        self.device = device
        self.token_ends_S = np.cumsum(rows.lengths_S)
        self.chosen_S = rows.chosen_S
        self.chosen_ends_S = np.cumsum(self.chosen_S)

    def inputs(self, members: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """input_ids_RC, position_ids_RC, select_N, targets_N of the sequences of some rows."""
        sequences, picked, targets = [], [], []
        for s in self._sequences(members):
            start, end = self.token_ends_S[s] - self.rows.lengths_S[s], self.token_ends_S[s]
            sequences.append(self.rows.tokens_T[start:end])
            chosen = np.flatnonzero(self.rows.chosen_T[start:end])
            picked.append(chosen - self.shift)
            targets.append(sequences[-1][chosen])
        longest = max(map(len, sequences))
        if self.pack_length > longest:
            packed = pack([s.tolist() for s in sequences], capacity=self.pack_length, pad_id=self.pad_id)
            ids, positions = packed.input_ids_RC, packed.position_ids_RC
            bases = [packed.flat_index(i, 0) for i in range(len(sequences))]
        else:
            # one sequence a row, padded on the right: causal attention never sees the padding, so no mask is needed
            ids = np.full((len(sequences), longest), self.pad_id, dtype=np.int64)
            for i, sequence in enumerate(sequences):
                ids[i, : len(sequence)] = sequence
            ids, positions = torch.from_numpy(ids), torch.arange(longest).expand(len(sequences), -1)
            bases = [i * longest for i in range(len(sequences))]
        select = np.concatenate([p + base for p, base in zip(picked, bases)])
        wanted = np.concatenate(targets).astype(np.int64)
        move = lambda x: x.to(self.device)
        return move(ids), move(positions), move(torch.from_numpy(select)), move(torch.from_numpy(wanted))

    def micro_batch(self, members: list[int], *, filler: bool) -> MicroBatch:
        """Masks and fields of the same sequences, padded to [S, L]."""
        sequences = list(self._sequences(members))
        width = max(1, int(self.chosen_S[sequences].max()))
        mask = np.zeros((len(sequences), width), dtype=bool)
        fields = {name: np.zeros((len(sequences), width), dtype=np.float32) for name in self.rows.token_fields}
        for i, s in enumerate(sequences):
            count, end = self.chosen_S[s], self.chosen_ends_S[s]
            mask[i, :count] = not filler
            for name, padded in fields.items():
                padded[i, :count] = self.rows.token_fields[name][end - count : end]
        move = lambda x: torch.from_numpy(x).to(self.device)
        weight = np.full(len(members), 0.0 if filler else 1.0, dtype=np.float32)
        return MicroBatch(
            move(mask), move(weight), move(self.chosen_S[sequences]), {n: move(v) for n, v in fields.items()},
            {n: move(np.ascontiguousarray(v[members])) for n, v in self.rows.row_fields.items()},
        )  # fmt: skip

    def padded(self, outputs_N: Tensor, members: list[int]) -> Tensor:
        """Outputs of the chosen tokens -> [S, L], zero elsewhere; differentiable."""
        counts = torch.from_numpy(self.chosen_S[list(self._sequences(members))]).to(self.device)
        width = max(1, int(counts.max()))
        slots = torch.arange(width, device=self.device)[None, :] < counts[:, None]
        return torch.zeros(slots.shape, dtype=outputs_N.dtype, device=self.device).masked_scatter(slots, outputs_N)

    def _sequences(self, members: list[int]):
        k = self.rows.per_row
        return [row * k + i for row in members for i in range(k)]
