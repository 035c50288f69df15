"""The core's loop, the same wherever the core runs: here, in a thread, or in a process of its own.

    plan ahead ─▶ wait for a command or a result ─▶ process outputs ─▶ send

With asynchronous scheduling the runner has a thread of its own, so commands are answered and signs
of life are sent while a step runs. Without it the loop waits for the step, and takes what came
meanwhile before it plans the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from girih.kernels.base.errors import EngineError, GirihError, QueueFullError
from girih.kernels.base.openmp import with_own_team
from girih.runtime.client.control import call_method, note_refusal
from girih.runtime.client.transport import Build, BuiltEngine, Port
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import (
    AbortRequests,
    AddRequests,
    Admission,
    Alive,
    Answer,
    Call,
    Command,
    Died,
    Hello,
    Outputs,
    Ready,
    Refusal,
)
from girih.runtime.records.request import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0  # between signs of life


class CoreLoop:
    """Serves a core to its front ends.

    Args:
        engine: the core, which nobody else calls, and its facts.
        port: where the front ends are.
    """

    def __init__(self, engine: BuiltEngine, port: Port) -> None:
        self._core = engine.core
        self._facts = engine.facts
        self._port = port
        self._owner: dict[str, bytes] = {}  # request id -> front end
        self._is_stopping = False
        self._next_alive = 0.0
        self._core.on_result(port.wake)
        self._core.sign_of_life = lambda: port.broadcast(Alive(0.0))

    def stop(self) -> None:
        """End `run` soon (from any thread)."""
        self._is_stopping = True
        self._port.wake()

    def announce(self) -> None:
        """Tell the front ends that requests are taken."""
        self._abort_requests_of(self._port.broadcast(Ready(self._facts)))

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            EngineError: the core died; every request has been told.
        """
        try:
            while not self._is_stopping:
                self.serve_once(ALIVE_SECONDS)
        finally:
            self._core.close_observers()

    def serve_once(self, timeout: float) -> None:
        """Plan, wait up to `timeout` seconds for a command or a result, and deal with it.

        Raises:
            EngineError: the core died.
        """
        core = self._core
        if not core.is_async:
            self.take_commands(0.0)
        core.plan_ahead()
        if core.is_async or not core.has_result():
            self.take_commands(0.0 if core.has_result() else timeout)
        if core.has_result():
            self._send_outputs(core.process_outputs())
        if core.failure is not None:
            raise EngineError(core.failure)
        if time.monotonic() >= self._next_alive:
            self._next_alive = time.monotonic() + ALIVE_SECONDS
            self._abort_requests_of(self._port.broadcast(Alive(core.seconds_in_step())))

    def take_commands(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for commands and carry them out."""
        for client, command in self._port.receive(timeout):
            self._handle(client, command)

    def _handle(self, client: bytes, command: Command) -> None:
        if isinstance(command, AddRequests):
            for request in command.requests:
                self._add(client, request)
        elif isinstance(command, AbortRequests):
            self._abort(command.request_ids)
        elif isinstance(command, Hello):
            self._port.send(client, Ready(self._facts))
        elif isinstance(command, Call):
            answer = answer_call(self._core, command)
            self._send_outputs(self._core.take_outputs())
            self._port.send(client, answer)

    def _add(self, client: bytes, request: EngineRequest) -> None:
        admission = admit(self._core, request)
        if admission.refusal is None:
            self._owner[request.request_id] = client
        if not self._port.send(client, admission):
            self._abort_requests_of([client])

    def _abort(self, request_ids: list[str]) -> None:
        for output in self._core.abort(request_ids):
            self._owner.pop(output.request_id, None)

    def _send_outputs(self, outputs: list[EngineOutput]) -> None:
        by_client: dict[bytes, list[EngineOutput]] = {}
        for output in outputs:
            is_last = output.finish_reason is not None
            owner = self._owner.pop if is_last else self._owner.get
            by_client.setdefault(owner(output.request_id), []).append(output)  # type: ignore[arg-type]
        for client, its_outputs in by_client.items():
            if not self._port.send(client, Outputs(its_outputs)):
                self._abort_requests_of([client])

    def _abort_requests_of(self, gone: list[bytes]) -> None:
        """Free what front ends left behind that went away."""
        if gone:
            self._abort([i for i, client in self._owner.items() if client in gone])


def serve_engine(build: Build, port: Port, on_ready: Callable[[CoreLoop], None]) -> None:
    """Build an engine and serve it: all that the core's thread or process does.

    Args:
        build: makes the engine.
        port: where its front ends are; told of progress, of readiness, and of the end.
        on_ready: called with the loop before it runs.

    Raises:
        BaseException: building failed, or the core died; the front ends have been told.
    """
    try:
        loop = CoreLoop(with_own_team(lambda: build(port.tell_progress)), port)
        on_ready(loop)
        loop.announce()
        loop.run()
    except BaseException as error:
        if not isinstance(error, GirihError):  # the front end tells what was raised on purpose
            logger.error("the engine ends", exc_info=True)
        port.broadcast(Died(Refusal.of(error)))
        raise


def admit(core: EngineCore, request: EngineRequest) -> Admission:
    """Hand a request to the core and say how that went; no request brings the core down."""
    try:
        core.add_request(request)
    except Exception as error:
        if isinstance(error, QueueFullError):
            note_refusal(core, error)
        _log_unexpected(f"request {request.request_id}", error)
        return Admission(request.request_id, Refusal.of(error))
    return Admission(request.request_id)


def answer_call(core: EngineCore, call: Call) -> Answer:
    """Do what `call` asks and say how that went; no call brings the core down."""
    try:
        return Answer(call.call_id, call_method(core, call.method, call.arguments))
    except Exception as error:
        _log_unexpected(call.method, error)
        return Answer(call.call_id, refusal=Refusal.of(error))


def _log_unexpected(what: str, error: Exception) -> None:
    if not isinstance(error, GirihError):
        logger.error("%s failed", what, exc_info=error)
