"""Pending work, such as a grammar's compilation, that delays a request's admission. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from girih.runtime.records.sampling_params import SamplingParams


class PendingGrammar(Protocol):
    """A future of pending work; its result is kept for as long as somebody holds the future."""

    def done(self) -> bool:
        """Return whether the work has ended, with a result or an error."""
        ...


class PendingGrammars(Protocol):
    """Work that requests wait for before they are queued; it runs in other threads."""

    def start(self, sampling: SamplingParams) -> PendingGrammar | None:
        """Start the work a request waits for and return its future; None for nothing."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something became ready, at the latest after `seconds`."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in another thread, whenever something became ready."""
        ...


class NoPendingGrammars:
    """Nothing to wait for."""

    def start(self, sampling: SamplingParams) -> None:
        """Nothing is needed."""

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Nothing will ever become ready."""
