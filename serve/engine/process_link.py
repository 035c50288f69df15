"""An engine core in another process, reached from the event loop through a `CoreConnection`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from girih.kernels.base.errors import EngineError
from girih.kernels.base.progress import Progress as ProgressObserver
from girih.kernels.base.progress import no_progress
from girih.runtime.client.core_connection import CoreConnection, Disconnected
from girih.runtime.records.messages import (
    AbortRequests,
    AddRequest,
    Alive,
    Answer,
    Call,
    Died,
    EngineFacts,
    Message,
    Outputs,
    Progress,
    Ready,
)
from girih.runtime.records.request import EngineRequest
from girih.serve.engine.core_link import CoreListener, PendingCalls


class ProcessLink:
    """A core in another process.

    Args:
        address: where it listens, or will.
        restarts: whether another core comes when this one dies.
        progress: observer of the core's start-up work.
    """

    def __init__(
        self, address: str, restarts: bool = False, progress: ProgressObserver = no_progress
    ) -> None:
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._restarts = restarts
        self._progress = progress
        self._calls = PendingCalls()
        self._facts: asyncio.Future[EngineFacts] = self._loop.create_future()
        self._listener: CoreListener | None = None
        self._is_connected = False
        self._heard = time.monotonic()
        self._step_began: float | None = None  # of the running step, as `Alive` had it last
        self._connection = CoreConnection(address)
        self._files: tuple[int, ...] = ()
        self._watch_files()

    @property
    def error(self) -> BaseException | None:
        """See `CoreLink.error`."""
        return self._error

    async def ready(self) -> EngineFacts:
        """Wait until the core takes requests.

        Raises:
            GirihError: it could not be built.
        """
        return await self._facts

    def start(self, listener: CoreListener) -> None:
        """See `CoreLink.start`."""
        self._listener = listener
        if self._error is not None:  # it died before anybody listened
            self._loop.call_soon(listener.on_death, self._error)

    def add(self, request: EngineRequest) -> None:
        """See `CoreLink.add`."""
        self._check_connected()
        self._send(AddRequest(request))

    def abort(self, request_ids: list[str]) -> None:
        """See `CoreLink.abort`."""
        if self._is_connected:
            self._send(AbortRequests(request_ids))

    async def call(self, method: str, **arguments: Any) -> Any:
        """See `CoreLink.call`."""
        self._check_connected()
        call, answer = self._calls.new(method, arguments)
        self._send(call)
        return await answer

    def seconds_stuck(self) -> float:
        """See `CoreLink.seconds_stuck`."""
        since = self._heard if self._step_began is None else min(self._heard, self._step_began)
        return time.monotonic() - since

    def fail(self, error: BaseException) -> None:
        """Take note that the core is gone for good (whoever watches its process knows)."""
        if self._error is not None:
            return
        self._error = error
        self._is_connected = False
        self._calls.fail_all(f"the engine died: {error}")
        if not self._facts.done():
            self._facts.set_exception(error)
        elif self._listener is not None:
            self._listener.on_death(error)

    def close(self) -> None:
        """See `CoreLink.close`."""
        self._calls.fail_all("the engine is shutting down")
        self._forget_files()
        self._connection.close()
        self._facts.cancel()

    def _check_connected(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine died: {self._error}")
        if not self._is_connected:
            raise EngineError("the engine is being started again; try again soon")

    def _send(self, command: AddRequest | AbortRequests | Call) -> None:
        self._connection.send(command)
        self._loop.call_soon(self._receive)  # sending may have swallowed the edge

    def _watch_files(self) -> None:
        self._files = self._connection.files
        for file in self._files:
            self._loop.add_reader(file, self._receive)
        self._loop.call_soon(self._receive)

    def _forget_files(self) -> None:
        for file in self._files:
            self._loop.remove_reader(file)
        self._files = ()

    def _receive(self) -> None:
        if not self._files:
            return  # closed meanwhile
        for message in self._connection.receive():
            if isinstance(message, Disconnected):
                self._forget_files()
                self._watch_files()
                self._lose()
            else:
                self._heard = time.monotonic()
                self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Outputs):
            self._step_began = None
            if self._listener is not None:
                self._listener.on_records(list(message.outputs))
        elif isinstance(message, Alive):
            seconds = message.step_seconds
            self._step_began = self._heard - seconds if seconds else None
        elif isinstance(message, Answer):
            self._calls.settle(message)
        elif isinstance(message, Progress):
            self._progress(message.as_event())
        elif isinstance(message, Ready):
            self._become_ready(message.facts)
        elif isinstance(message, Died):
            if not (self._restarts and self._facts.done()):
                self.fail(message.refusal.as_error())
        elif self._listener is not None:
            self._listener.on_records([message])

    def _become_ready(self, facts: EngineFacts) -> None:
        was_connected, self._is_connected = self._is_connected, True
        if not self._facts.done():
            self._facts.set_result(facts)
        elif not was_connected and self._listener is not None:
            self._listener.on_back()

    def _lose(self) -> None:
        was_connected, self._is_connected = self._is_connected, False
        self._step_began = None
        self._calls.fail_all("the engine process ended")
        if not was_connected:
            return  # while it is built its supervisor knows more
        if not self._restarts:
            self.fail(EngineError("the engine process ended"))
        elif self._listener is not None:
            self._listener.on_lost()
