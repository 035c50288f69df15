"""`CoreClient`: the one way from a front end to an engine core, wherever that runs.

    add, abort, call ─▶ Transport ─▶ core
    poll ◀─ Admission, EngineOutput, Lost, Back, Gone ◀─ Transport ◀─ core

One thread at a time uses a client. It never waits by itself: `wait` does, or whoever watches
`fileno`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from girih.kernels.base.errors import EngineError
from girih.kernels.base.progress import Progress as ProgressObserver
from girih.kernels.base.progress import ProgressEvent, no_progress
from girih.runtime.client.transport import Disconnected, Gone, Received, Transport
from girih.runtime.records.messages import (
    AbortRequests,
    AddRequests,
    Admission,
    Alive,
    Answer,
    Call,
    Died,
    EngineFacts,
    Outputs,
    Progress,
    Ready,
)
from girih.runtime.records.request import EngineOutput, EngineRequest


@dataclass(frozen=True)
class Lost:
    """The core's process ended, and another one comes; it knows nothing of the requests."""


@dataclass(frozen=True)
class Back:
    """A new core takes requests."""


Event = Admission | EngineOutput | Lost | Back | Gone


class CoreClient:
    """Speaks with one core at a time.

    Args:
        transport: the way to the core; this object closes it.
        progress: told of the core's start-up work.

    Attributes:
        ready: the core's facts, as soon as it takes requests; the error when it could not be built.
        progress: as given; it may be replaced before `start`.
        error: why the core is gone for good; None while it is not.
    """

    def __init__(self, transport: Transport, progress: ProgressObserver = no_progress) -> None:
        self.transport = transport
        self.progress = progress
        self.ready: Future[EngineFacts] = Future()
        self.error: BaseException | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._is_connected = False
        self._heard = time.monotonic()
        self._step_began: float | None = None  # of the running step, as `Alive` had it last

    @property
    def facts(self) -> EngineFacts:
        """The facts that the core reports once it is ready.

        Raises:
            GirihError: it could not be built.
        """
        return self.ready.result(0)

    def start(self) -> None:
        """Begin to start the core, or to connect; raises as `Transport.start`."""
        self.transport.start(self._on_progress)

    def fileno(self) -> int:
        """A descriptor that is readable when `poll` may have something."""
        return self.transport.fileno()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Hand requests over together, before the next step; an `Admission` answers each, in order.

        Raises:
            EngineError: the core is not there.
            RequestError: a value in one cannot travel.
        """
        self._check_connected()
        self.transport.send(AddRequests(list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Have requests dropped; nothing answers, and nothing more comes of them."""
        if self._is_connected:
            self.transport.send(AbortRequests(list(request_ids)))

    def call(self, method: str, **arguments: Any) -> Future[Any]:
        """Have the core do something (see `control.py`); `poll` settles the future.

        Raises:
            EngineError: the core is not there.
        """
        self._check_connected()
        call = Call(next(self._numbers), method, arguments)
        answer: Future[Any] = Future()
        self._calls[call.call_id] = answer
        self.transport.send(call)
        return answer

    def poll(self) -> list[Event]:
        """Take in what came, without waiting; returns what concerns requests, in order."""
        events: list[Event] = []
        for received in self.transport.receive():
            self._handle(received, events)
        return events

    def wait(self, timeout: float) -> None:
        """Return once `poll` has something to take in, or after `timeout` seconds."""
        self.transport.wait(timeout)

    def seconds_stuck(self) -> float:
        """Return the seconds the core has been busy with one step, or silent."""
        since = self._heard if self._step_began is None else min(self._heard, self._step_began)
        return time.monotonic() - since

    def close(self) -> None:
        """Let go of the core, and end it where the transport started it."""
        self._is_connected = False
        if self.error is None:
            self.error = EngineError("the engine was closed")
        self._fail_calls("the engine is shutting down")
        self.ready.cancel()
        self.transport.close()

    def _on_progress(self, event: ProgressEvent) -> None:
        self.progress(event)

    def _check_connected(self) -> None:
        if self.error is not None:
            raise EngineError(f"the engine died: {self.error}")
        if not self._is_connected:
            raise EngineError("the engine is being started again; try again soon")

    def _handle(self, received: Received, events: list[Event]) -> None:
        if isinstance(received, Gone):
            self._fail(received.error, events)
        elif isinstance(received, Disconnected):
            self._lose(events)
        else:
            self._heard = time.monotonic()
            self._handle_message(received, events)

    def _handle_message(self, message: Received, events: list[Event]) -> None:
        if isinstance(message, Outputs):
            self._step_began = None
            events += message.outputs
        elif isinstance(message, Admission):
            events.append(message)
        elif isinstance(message, Alive):
            seconds = message.step_seconds
            self._step_began = self._heard - seconds if seconds else None
        elif isinstance(message, Answer):
            self._settle(message)
        elif isinstance(message, Progress):
            self.progress(message.as_event())
        elif isinstance(message, Ready):
            self._become_ready(message.facts, events)
        elif isinstance(message, Died) and not (
            self.transport.may_come_back() and self.ready.done()
        ):
            self._fail(message.refusal.as_error(), events)

    def _become_ready(self, facts: EngineFacts, events: list[Event]) -> None:
        was_connected, self._is_connected = self._is_connected, True
        if not self.ready.done():
            self.ready.set_result(facts)
        elif not was_connected:
            events.append(Back())

    def _lose(self, events: list[Event]) -> None:
        was_connected, self._is_connected = self._is_connected, False
        self._step_began = None
        self._fail_calls("the engine process ended")
        if not was_connected:
            return  # while it is built its supervisor knows more
        if self.transport.may_come_back():
            events.append(Lost())
        else:
            self._fail(EngineError("the engine process ended"), events)

    def _fail(self, error: BaseException, events: list[Event]) -> None:
        if self.error is not None:
            return
        self.error = error
        self._is_connected = False
        self._fail_calls(f"the engine died: {error}")
        if not self.ready.done():
            self.ready.set_exception(error)
        else:
            events.append(Gone(error))

    def _settle(self, answer: Answer) -> None:
        future = self._calls.pop(answer.call_id, None)
        if future is None or future.done():
            return
        if answer.refusal is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.refusal.as_error())

    def _fail_calls(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        for future in calls.values():
            if not future.done():
                future.set_exception(EngineError(reason))
