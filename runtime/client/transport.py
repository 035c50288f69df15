"""The interface of transports between front end and core. A new way to a core is a new pair.

    front end                                        core
    CoreClient ─ Transport.send ─▶ (commands) ─▶ Port.receive ─ CoreLoop
    CoreClient ◀─ Transport.receive ─ (messages) ◀─ Port.send ─ CoreLoop

`local_transport.py` is the pair within a process, `zmq_transport.py` with `zmq_port.py` the pair
between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from girih.kernels.base.progress import Progress, ProgressEvent
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import Command, EngineFacts, Message


class BuiltEngine(Protocol):
    """An engine as its builder returns it."""

    @property
    def core(self) -> EngineCore:
        """The engine core."""

    @property
    def facts(self) -> EngineFacts:
        """The facts that front ends receive."""


class Build(Protocol):
    """Makes an engine; picklable where the core gets a process of its own."""

    def __call__(self, progress: Progress, /) -> BuiltEngine:
        """Build; `progress` is told how far that is."""


@dataclass(frozen=True)
class Disconnected:
    """The core is gone; nothing sent before will be answered. Another one may come."""


@dataclass(frozen=True)
class Gone:
    """The core is gone for good.

    Attributes:
        error: why.
    """

    error: BaseException


Received = Message | Disconnected | Gone


class Transport(Protocol):
    """A front end's end. One thread at a time uses it."""

    def start(self, progress: Progress) -> None:
        """Begin to connect, or to start the core.

        Args:
            progress: told of the start-up work where the caller's thread does it; elsewhere it
                comes as messages.

        Raises:
            GirihError: building failed, where the caller's thread does it.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when `receive` may have something."""

    def send(self, command: Command) -> None:
        """Hand a command over; never waits.

        Raises:
            RequestError: a value in it cannot travel.
        """

    def receive(self) -> list[Received]:
        """Return what came, without waiting."""

    def wait(self, timeout: float) -> None:
        """Return once `receive` has something, or after `timeout` seconds."""

    def may_come_back(self) -> bool:
        """Return whether another core follows one that ended."""

    def is_building(self) -> bool:
        """Return whether a thread of this process builds the engine (it cannot be interrupted)."""

    def close(self) -> None:
        """Let go of the core, and end it where this object started it; harmless when repeated."""


class Port(Protocol):
    """The core's end. One thread uses it, but for `wake`."""

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, Command]]:
        """Return (front end, command) of what came, after `timeout` seconds or `wake` at most."""

    def send(self, client: bytes, message: Message) -> bool:
        """Send without waiting; False when the front end is gone or does not read."""

    def broadcast(self, message: Message) -> list[bytes]:
        """Send to every front end; returns those that are gone."""

    def tell_progress(self, event: ProgressEvent) -> None:
        """Tell every front end how far building is."""

    def wake(self) -> None:
        """End a running `receive` (from any thread)."""

    def close(self) -> None:
        """Send what is queued for a moment, then close."""
