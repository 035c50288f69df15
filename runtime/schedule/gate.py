"""What a request may have to wait for outside the scheduler before it is admitted. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from girih.runtime.records.sampling_params import SamplingParams


class Ticket(Protocol):
    """What one request waits for; it is kept for as long as somebody holds the ticket."""

    def done(self) -> bool:
        """Whether it is there, good or bad."""
        ...


class Gate(Protocol):
    """Says when a request may be queued; the work it waits for goes on in other threads."""

    def ticket(self, sampling: SamplingParams) -> Ticket | None:
        """What a request needs from outside, and start the work on it; None for nothing."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something became ready, at the latest after `seconds`."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in another thread, whenever something became ready."""
        ...


class OpenGate:
    """Nothing to wait for."""

    def ticket(self, sampling: SamplingParams) -> None:
        """Nothing is needed."""

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Nothing will ever become ready."""
