"""Logits processors for tests."""

from __future__ import annotations

import numpy as np
import torch

from girih.runtime.records.plans import NewRequest
from girih.runtime.sample.logits_processors import LogitsProcessor, RowTokens


class Staircase(LogitsProcessor):
    """Allows only tokens `start`, `start` + 1, ... one per output token, by row.

    Keeps a column by row, so that a wrong row shows as a wrong token.
    """

    arguments = ("staircase",)

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        super().__init__(vocab_size, max_num_seqs)
        self.start = np.full(max_num_seqs, -1)

    def check(self, params):
        value = (params.extra_args or {}).get("staircase", 0)
        if not isinstance(value, int) or not 0 <= value < self.vocab_size:
            raise ValueError(f"staircase is {value!r}; it is a token id")

    def add(self, row: int, request: NewRequest) -> bool:
        value = (request.sampling.extra_args or {}).get("staircase")
        if value is None:
            return False
        assert self.start[row] == -1, "the row is taken"
        self.start[row] = value
        return True

    def drop(self, row: int) -> None:
        assert self.start[row] >= 0, "the row is free"
        self.start[row] = -1

    def move(self, source: int, target: int) -> None:
        assert self.start[target] == -1, "the row is taken"
        self.start[target], self.start[source] = self.start[source], -1

    def apply(self, logits: torch.Tensor, rows, tokens: RowTokens) -> torch.Tensor:
        steps = tokens.num_tokens[rows] - tokens.num_prompt_tokens[rows]
        wanted = torch.from_numpy((self.start[rows] + steps) % self.vocab_size)
        assert (self.start[rows] >= 0).all(), "a row that nobody added"
        changed = torch.full_like(logits, -torch.inf)
        return changed.scatter_(1, wanted[:, None], 0.0)


class Broken(LogitsProcessor):
    """Fails in the method that the request names."""

    arguments = ("break",)

    def add(self, row: int, request: NewRequest) -> bool:
        self.how = (request.sampling.extra_args or {}).get("break", "")
        if self.how == "add":
            raise KeyError("add")
        return bool(self.how)

    def apply(self, logits: torch.Tensor, rows, tokens: RowTokens) -> torch.Tensor:
        if self.how == "nan":
            return logits * torch.nan
        if self.how == "shape":
            return logits[:, 1:]
        raise ZeroDivisionError("apply")


class Unmakeable(LogitsProcessor):
    """Cannot be made."""

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        raise OSError("no table")
