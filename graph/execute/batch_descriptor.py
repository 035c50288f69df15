"""The shapes that a captured step is made for. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from girih.kernels.base.errors import EngineError


@dataclass(frozen=True)
class BatchDescriptor:
    """The padded shape of a step, and what of it is fixed: one captured step per descriptor.

    Attributes:
        tokens: T after padding.
        requests: R after padding, and as many rows of logits: everything is captured, attention
            and head as well. None: any number; attention and the piece with the head run outside.
        is_uniform: every request has one token, so that T is R.
    """

    tokens: int
    requests: int | None = None
    is_uniform: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.is_uniform and self.requests != self.tokens):
            raise EngineError(
                f"{self} describes no step: it has at least one token, and with one token per "
                "request as many requests as tokens"
            )

    @property
    def is_whole(self) -> bool:
        """True if nothing of the step runs outside of what was captured."""
        return self.requests is not None
