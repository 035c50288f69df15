"""A core in this process: commands and messages pass as they are.

LocalTransport   the core has a thread of its own
SteppedTransport no thread: whoever waits for messages runs the core's loop meanwhile
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

from girih.kernels.base.errors import EngineError
from girih.kernels.base.openmp import with_own_team
from girih.kernels.base.progress import Progress, ProgressEvent
from girih.runtime.client.loop import CoreLoop, serve_engine
from girih.runtime.client.transport import Build, BuiltEngine, Received
from girih.runtime.records.messages import Command, Died, Message, Refusal
from girih.runtime.records.messages import Progress as ProgressMessage

CLIENT = b"local"
JOIN_SECONDS = 5.0  # a core's thread that has not ended by then is left behind


class LocalPort:
    """The core's end of a queue within the process; one front end is there from the start."""

    def __init__(self) -> None:
        self.messages: deque[Received] = deque()
        self.readable = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._commands: deque[Command] = deque()
        self._news = threading.Condition()
        self._is_woken = False
        self._is_closed = False

    def put(self, command: Command) -> None:
        """Queue a command of the front end (from any thread)."""
        with self._news:
            self._commands.append(command)
            self._news.notify()

    def receive(self, timeout: float = 0.0) -> list[tuple[bytes, Command]]:
        """See `Port.receive`."""
        with self._news:
            if not (self._commands or self._is_woken) and timeout > 0:
                self._news.wait(timeout)
            self._is_woken = False
            commands = [(CLIENT, command) for command in self._commands]
            self._commands.clear()
        return commands

    def send(self, client: bytes, message: Message) -> bool:
        """See `Port.send`."""
        with self._news:
            if self._is_closed:
                return False
            self.messages.append(message)
            os.eventfd_write(self.readable, 1)
        return True

    def broadcast(self, message: Message) -> list[bytes]:
        """See `Port.broadcast`."""
        return [] if self.send(CLIENT, message) else [CLIENT]

    def tell_progress(self, event: ProgressEvent) -> None:
        """See `Port.tell_progress`."""
        self.send(CLIENT, ProgressMessage.of(event))

    def wake(self) -> None:
        """See `Port.wake`."""
        with self._news:
            self._is_woken = True
            self._news.notify()

    def close(self) -> None:
        """See `Port.close`."""
        with self._news:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.readable)

    def take(self) -> list[Received]:
        """Return the messages for the front end."""
        taken: list[Received] = []
        if self._is_closed:
            return taken
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.readable)
        while self.messages:
            taken.append(self.messages.popleft())
        return taken


class _Local:
    """Base of both: the queue, and that no core follows one that ended."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._port = LocalPort()

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._port.readable

    def receive(self) -> list[Received]:
        """See `Transport.receive`."""
        return self._port.take()

    def may_come_back(self) -> bool:
        """See `Transport.may_come_back`."""
        return False


class LocalTransport(_Local):
    """Builds the engine in a thread, which then serves it.

    Args:
        build: makes the engine.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._loop: CoreLoop | None = None
        self._thread = threading.Thread(target=self._serve, name="girih-engine", daemon=True)
        self._has_started = False
        self._is_closed = False

    def start(self, progress: Progress) -> None:
        """See `Transport.start`."""
        if not self._has_started:
            self._has_started = True
            self._thread.start()

    def send(self, command: Command) -> None:
        """See `Transport.send`."""
        self._port.put(command)

    def wait(self, timeout: float) -> None:
        """See `Transport.wait`."""
        if not self._port.messages:
            select.select([self._port.readable], [], [], timeout)

    def is_building(self) -> bool:
        """See `Transport.is_building`."""
        return self._loop is None and self._thread.is_alive()

    def close(self) -> None:
        """See `Transport.close`; a build goes on to its end, and its engine is dropped."""
        self._is_closed = True
        if self._loop is not None:
            self._loop.stop()
            self._thread.join(JOIN_SECONDS)
        self._port.close()

    def _serve(self) -> None:
        with contextlib.suppress(BaseException):  # the front end has been told
            serve_engine(self._build, self._port, self._on_ready)

    def _on_ready(self, loop: CoreLoop) -> None:
        self._loop = loop
        if self._is_closed:
            loop.stop()


class SteppedTransport(_Local):
    """Builds and runs the core in the threads that use this object, one at a time.

    Args:
        build: makes the engine.

    Attributes:
        engine: what was built, once `start` returned.
    """

    engine: BuiltEngine

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self._loop: CoreLoop | None = None
        self._is_stepping = False

    def start(self, progress: Progress) -> None:
        """See `Transport.start`."""
        self.engine = with_own_team(lambda: self._build(progress))
        self._loop = CoreLoop(self.engine, self._port)
        self._loop.announce()

    def send(self, command: Command) -> None:
        """See `Transport.send`; it is carried out at once, between two steps."""
        self._port.put(command)
        if self._loop is not None and not self._is_stepping:
            self._loop.take_commands(0.0)

    def wait(self, timeout: float) -> None:
        """See `Transport.wait`; makes a step if there is one to make."""
        if self._loop is None or self._port.messages:
            return
        self._is_stepping = True
        try:
            self._loop.serve_once(timeout)
        except EngineError as error:
            self._port.send(CLIENT, Died(Refusal.of(error)))
        finally:
            self._is_stepping = False

    def is_building(self) -> bool:
        """See `Transport.is_building`: `start` builds, and returns when that is done."""
        return False

    def close(self) -> None:
        """See `Transport.close`."""
        if self._loop is not None:
            self._loop = None
            self.engine.core.close()
        self._port.close()
