"""Rows of token sequences as flat NumPy columns: what a driver sends to trainer ranks, free of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Rows:
    """B rows of `per_row` sequences each (1; 2 for pairs); S = B * per_row sequences, T tokens, N chosen tokens."""

    tokens_T: np.ndarray
    """int32 token ids, sequence after sequence."""
    lengths_S: np.ndarray
    """int64 tokens of each sequence."""
    chosen_T: np.ndarray
    """bool, True on the tokens that the work is about: trained, scored or valued. Never the first of a sequence."""
    per_row: int = 1
    token_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> float32 of N values, one per chosen token, in the order of tokens_T."""
    row_fields: Mapping[str, np.ndarray] = field(default_factory=dict)
    """name -> float32 of B values."""

    def __post_init__(self):
        starts = np.cumsum(self.lengths_S) - self.lengths_S
        if self.lengths_S.min(initial=1) < 1 or not self.lengths_S.sum() == len(self.tokens_T) == len(self.chosen_T):
            raise ValueError("lengths, tokens and chosen do not fit together")
        if len(self.lengths_S) % self.per_row:
            raise ValueError(f"{len(self.lengths_S)} sequences do not make rows of {self.per_row}")
        if self.chosen_T[starts].any():
            raise ValueError("the first token of a sequence is chosen, but nothing predicts it")
        for name, values in self.token_fields.items():
            if len(values) != int(self.chosen_T.sum()):
                raise ValueError(f"{name}: {len(values)} values for {int(self.chosen_T.sum())} chosen tokens")
        for name, values in self.row_fields.items():
            if len(values) != len(self):
                raise ValueError(f"{name}: {len(values)} values for {len(self)} rows")

    def __len__(self) -> int:
        return len(self.lengths_S) // self.per_row

    @property
    def row_tokens_B(self) -> np.ndarray:
        """Tokens of each row, over its sequences."""
        return self.lengths_S.reshape(-1, self.per_row).sum(axis=1)

    @property
    def chosen_S(self) -> np.ndarray:
        """Chosen tokens of each sequence."""
        ends = np.cumsum(self.lengths_S)
        total = np.concatenate([[0], np.cumsum(self.chosen_T)])
        return total[ends] - total[ends - self.lengths_S]

    @classmethod
    def of(cls, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], *, per_row: int = 1, last_only: bool = False,
           token_fields: Mapping[str, Sequence[Sequence[float]]] = {}, row_fields: Mapping[str, Sequence[float]] = {}) -> Rows:  # fmt: skip
        """Rows of (prompt ids, response ids); the response tokens are the chosen ones, or only the last token of all.

        token_fields: name -> for each sequence, a value per response token.
        """
        lengths = np.array([len(p) + len(r) for p, r in sequences], dtype=np.int64)
        tokens = np.fromiter((t for p, r in sequences for t in (*p, *r)), dtype=np.int32, count=int(lengths.sum()))
        chosen = np.zeros(len(tokens), dtype=bool)
        end = 0
        for (prompt, _), length in zip(sequences, lengths):
            start, end = end, end + int(length)
            chosen[end - 1 if last_only else start + len(prompt) : end] = True
        flat = {n: np.fromiter((x for row in v for x in row), dtype=np.float32) for n, v in token_fields.items()}
        return cls(tokens, lengths, chosen, per_row, flat, {n: np.asarray(v, dtype=np.float32) for n, v in row_fields.items()})

    @classmethod
    def masked(cls, tokens: Sequence[Sequence[int]], chosen: Sequence[Sequence[bool]]) -> Rows:
        """Rows of one sequence each, with any of their tokens chosen."""
        lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        flat = np.fromiter((t for row in tokens for t in row), dtype=np.int32, count=int(lengths.sum()))
        return cls(flat, lengths, np.fromiter((c for row in chosen for c in row), dtype=bool, count=len(flat)))

    def split(self, values_N: np.ndarray) -> list[np.ndarray]:
        """A value per chosen token -> one array per sequence."""
        return np.split(values_N, np.cumsum(self.chosen_S)[:-1])
