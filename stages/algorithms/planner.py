"""Which rows go into which micro-batch of which step, decided before the first step; pure Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Number = TypeVar("Number")  # float or Tensor


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    rows: list[int]
    """Row indexes in epoch order; the same for any number of ranks and any micro-batch size."""
    micro_batches: list[list[list[int]]]
    """[rank][micro-batch] -> row indexes; equally many on each rank, an empty one being a zero-weight filler."""


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of item indexes, each in the first bin with room. ValueError for a length outside 0..capacity."""
    bins: list[list[int]] = []
    room: list[int] = []
    for item, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(f"item {item} has {length} tokens, and a bin holds 0 to {capacity}")
        fit = next((b for b, free in enumerate(room) if free >= length), len(bins))
        if fit == len(bins):
            bins.append([])
            room.append(capacity)
        bins[fit].append(item)
        room[fit] -= length
    return bins


def micro_batch_count(bins: int, *, minimum: int, ranks: int) -> int:
    """Micro-batches over all ranks: at least `bins` and `minimum`, rounded up to a multiple of ranks: no rank waits."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    return -(-max(bins, minimum) // ranks) * ranks


def plan_steps(lengths: Sequence[int], order: Sequence[int], *, rows_per_step: int, ranks: int, tokens_per_micro_batch: int) -> list[Step]:
    """Steps over the rows in the given order, each exactly once.

    lengths: tokens of each row, by row index.
    order: row indexes, as from epoch_order, or what is left of it on resume.
    rows_per_step: rows of one step, over all ranks; the last window of the order may hold fewer and is its own step.
    tokens_per_micro_batch: most tokens that one rank takes at a time.
    Within a step the longest rows are dealt out first, each to the rank with the fewest tokens (Graham 1969), and the
    rows of a rank, longest first, are binned by first fit. Ties go to the lower index.
    Raises ValueError when a row is longer than tokens_per_micro_batch, or rows_per_step or ranks is below 1.
    """
    for name, value in (("rows_per_step", rows_per_step), ("ranks", ranks)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    steps = []
    for start in range(0, len(order), rows_per_step):
        rows = list(order[start : start + rows_per_step])
        for row in rows:
            if lengths[row] > tokens_per_micro_batch:
                raise ValueError(f"row {row}: {lengths[row]} tokens, tokens_per_micro_batch {tokens_per_micro_batch}")
        micro_batches = []
        for shard in _balanced(rows, lengths, ranks):
            bins = first_fit([lengths[row] for row in shard], tokens_per_micro_batch)
            micro_batches.append([[shard[item] for item in members] for members in bins])
        most = max(len(batches) for batches in micro_batches)
        steps.append(Step(rows, [batches + [[] for _ in range(most - len(batches))] for batches in micro_batches]))
    return steps


def epoch_order(n: int, *, seed: int, epoch: int) -> list[int]:
    """Row indexes 0..n-1 in the shuffled order of one epoch, the same in every process and for any number of ranks."""
    order = list(range(n))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def resume_position(consumed: int, n: int) -> tuple[int, int]:
    """(epoch, rows of it already used) after `consumed` rows over all ranks. ValueError unless n > 0, consumed >= 0."""
    if n < 1 or consumed < 0:
        raise ValueError(f"cannot resume after {consumed} rows of {n}")
    return divmod(consumed, n)


def deepspeed_scale(sum_: Number, *, global_count: float, ranks: int, accumulation: int) -> Number:
    """Loss to give to DeepSpeed for one micro-batch, so that its averages leave sum / global_count of the whole step.

    sum_: Loss.sum of the micro-batch, a tensor or a number. global_count: Loss.count over all micro-batches and ranks
    of the step. DeepSpeed divides by accumulation and by ranks, which is taken back here.
    Raises ValueError when global_count is 0: there is nothing to train on.
    """
    if not global_count > 0:
        raise ValueError("a step needs at least one token or row of weight above 0")
    return sum_ * (ranks * accumulation / global_count)


def _balanced(rows: Sequence[int], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    shards: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        rank = min(range(ranks), key=lambda rank: (tokens[rank], len(shards[rank]), rank))
        shards[rank].append(row)
        tokens[rank] += lengths[row]
    return shards
