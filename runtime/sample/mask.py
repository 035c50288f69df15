"""Masks of single tokens on logits, one bit per token."""

from __future__ import annotations

import numpy as np
import torch


def unpack_mask(words: torch.Tensor, size: int) -> torch.Tensor:
    """Bits of int32 [G, ceil(size / 32)], lowest first, as bool [G, size]."""
    if words.device.type == "cpu":
        bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, count=size, bitorder="little")
        return torch.from_numpy(bits).view(torch.bool)
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).flatten(1)[:, :size].bool()


def masked(logits: torch.Tensor, rows: torch.Tensor, is_allowed: torch.Tensor) -> torch.Tensor:
    """A float32 copy of `logits` where tokens that `rows` do not allow have no chance."""
    if len(rows) == len(logits):  # all of them, in order: one pass
        return torch.where(is_allowed, logits, -torch.inf).to(torch.float32)
    work = logits.to(torch.float32, copy=True)
    work[rows] = work[rows].masked_fill_(~is_allowed, -torch.inf)
    return work


def revive(
    work: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, fits_grammar: torch.Tensor
) -> None:
    """Reset rows that have no token left to what their grammar allows, in place."""
    is_dead = work[rows].amax(dim=-1) == -torch.inf
    dead = rows[is_dead]
    work[dead] = logits[dead].float().masked_fill(~fits_grammar[is_dead], -torch.inf)
