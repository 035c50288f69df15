"""The tensors of one step: what the scheduler's plan becomes, and what the program reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from girih.kernels.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class StepInputs:
    """T packed tokens of R requests, S of them with an output (host memory on the CPU).

    Attributes:
        ids: int64 [T], token ids.
        positions: int64 [T], position of each token in its sequence.
        logits_index: int64 [S], the tokens whose logits are needed.
        attention: where each request's tokens begin, and where its context lies.
        state_slots: int32 [R], the row of each request in the states of recurrent layers; None for
            a program without them. A request that starts (its first token is at position 0) finds
            a zero state there, whatever the row held.
        token_types: int64 [T], which text of a pair each token is of; None where the model has no
            such types.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    logits_index: torch.Tensor
    attention: AttentionMetadata
    state_slots: torch.Tensor | None = None
    token_types: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.ids)

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.attention.seq_lens)
