"""Pending work, such as a grammar's compilation, that delays a request's admission. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from girih.runtime.records.sampling_params import SamplingParams


class Ticket(Protocol):
    """A future of pending work; its result is kept for as long as somebody holds the future."""

    def done(self) -> bool:
        """Return whether it is there, good or bad."""
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
