"""Several sequences in one row, none seeing another (R packed rows, C slots of each)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.planner import first_fit

IGNORED_TARGET = -100
"""Target of a slot that predicts nothing: the last token of a sequence, and padding."""


@dataclass(frozen=True)
class PackedBatch:
    """Sequences packed into rows. Segments (sequences, and the padding of a row) begin at position 0."""

    input_ids_RC: Tensor
    """int64 token ids; pad_id in padding slots."""
    position_ids_RC: Tensor
    """int64, from 0 in each segment, padding being a segment of its own."""
    targets_RC: Tensor
    """int64 next token of the same sequence; -100 at its end and in padding."""
    where: tuple[tuple[int, int], ...]
    """(row, offset) of the first token of each sequence, in the order given to pack."""

    def flat_index(self, sequence: int, position: int) -> int:
        """Index into the R * C flattened slots of a token of a sequence."""
        row, offset = self.where[sequence]
        return row * self.input_ids_RC.shape[1] + offset + position

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 boundaries of the segments in the R * C flattened slots, padding included: from 0 to R * C."""
        starts = (self.position_ids_RC.flatten() == 0).nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([self.position_ids_RC.numel()])]).to(torch.int32)


def pack(sequences: Sequence[Sequence[int]], *, capacity: int, pad_id: int) -> PackedBatch:
    """Packs sequences into rows of `capacity` slots, by first fit in the given order.

    sequences: token ids. Raises ValueError when there is none, or one is empty or longer than capacity.
    Krell et al. 2021.
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or min(lengths) == 0:
        raise ValueError("only one or more sequences of at least one token can be packed")
    rows = first_fit(lengths, capacity)
    where = [(0, 0)] * len(sequences)
    input_ids, position_ids, targets = [], [], []
    for r, members in enumerate(rows):
        ids: list[int] = []
        positions: list[int] = []
        following: list[int] = []
        for member in members:
            where[member] = (r, len(ids))
            ids += sequences[member]
            positions += range(lengths[member])
            following += [*sequences[member][1:], IGNORED_TARGET]
        padding = capacity - len(ids)
        input_ids.append(ids + [pad_id] * padding)
        position_ids.append([*positions, *range(padding)])
        targets.append(following + [IGNORED_TARGET] * padding)
    return PackedBatch(torch.tensor(input_ids), torch.tensor(position_ids), torch.tensor(targets), tuple(where))


def block_causal_mask(position_ids_RC: Tensor) -> Tensor:
    """visible_RCC, bool: [r, q, k] is True where slot k is in the segment of slot q and not after it."""
    segment_RC = (position_ids_RC == 0).cumsum(dim=1)
    slot_C = torch.arange(position_ids_RC.shape[1], device=position_ids_RC.device)
    return (segment_RC[:, :, None] == segment_RC[:, None, :]) & (slot_C[None, :, None] >= slot_C[None, None, :])


def padded_position_ids(mask_BL: Tensor) -> Tensor:
    """position_ids_BL, int64: 0, 1, 2, ... over the True slots of rows padded on either side, not packed."""
    return (mask_BL.long().cumsum(dim=1) - 1).clamp(min=0)
