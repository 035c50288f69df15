"""Records of single requests, and the latencies that follow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RequestRecord:
    """One request as its client saw it; times are seconds after the start of the measurement.

    Attributes:
        index: its place in the data set.
        due: when it should have been sent.
        sent: when it was (later than `due` when the concurrency limit held it back).
        ended: when its answer was complete, or it failed.
        pieces: when each piece of the answer came; a piece may hold several tokens.
        num_prompt_tokens: as the server counts; None when it does not say.
        num_cached_tokens: prompt tokens the server found in its cache.
        num_output_tokens: as the server counts, else the number of pieces.
        counted_by: "server" or "pieces".
        finish_reason: as the server says.
        error: why it failed, or None.
    """

    index: int
    due: float
    sent: float = 0.0
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: str = "pieces"
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first piece."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def e2e(self) -> float:
        """Seconds from sending to the end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two tokens."""
        if len(self.pieces) < 2 or self.num_output_tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.num_output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between one piece and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.pieces)]

    def as_line(self) -> dict[str, Any]:
        """Return the record for a JSON line, latencies in ms."""
        ms = {
            "ttft_ms": _ms(self.ttft),
            "tpot_ms": _ms(self.tpot),
            "e2e_ms": _ms(self.e2e),
            "itl_ms": [_ms(gap) for gap in self.itl],
        }
        times = {name: round(getattr(self, name), 6) for name in ("due", "sent", "ended")}
        skipped = ("pieces", *times)
        facts = {name: value for name, value in vars(self).items() if name not in skipped}
        return {**facts, **times, **ms}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
