"""What a request may have to wait for outside the scheduler before it is admitted. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from girih.runtime.sampling_params import SamplingParams


class Gate(Protocol):
    """Says when a request may be queued; the work it waits for goes on in other threads."""

    def must_wait(self, sampling: SamplingParams) -> bool:
        """Whether something is missing still; the first question starts the work on it."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something became ready, at the latest after `seconds`."""
        ...

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in another thread, whenever something became ready."""
        ...


class OpenGate:
    """Nothing to wait for."""

    def must_wait(self, sampling: SamplingParams) -> bool:
        """Never."""
        return False

    def wait(self, seconds: float) -> None:
        """Return at once."""

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Nothing will ever become ready."""
