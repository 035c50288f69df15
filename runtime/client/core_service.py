"""Serves an engine core to its front ends: the loop of the core's process.

    plan ahead ─▶ wait for a command or a result ─▶ digest ─▶ send

With asynchronous scheduling the runner has a thread of its own, so commands are answered and signs
of life are sent while a step runs. Without it the loop waits for the step, and takes what came
meanwhile before it plans the next one.
"""

from __future__ import annotations

import logging
import time

from girih.kernels.base.errors import EngineError, GirihError, QueueFullError
from girih.runtime.client.control import call_method, note_refusal
from girih.runtime.client.core_endpoint import CoreEndpoint
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import (
    AbortRequests,
    AddRequest,
    AddRequests,
    Admission,
    Alive,
    Answer,
    Call,
    Command,
    EngineFacts,
    Hello,
    Outputs,
    Ready,
    Refusal,
)
from girih.runtime.records.request import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)

ALIVE_SECONDS = 1.0  # between signs of life


class CoreService:
    """Runs until `stop` or until the core dies.

    Args:
        core: the engine core; nobody else calls it.
        facts: what front ends are told of it.
        endpoint: where they are.
    """

    def __init__(self, core: EngineCore, facts: EngineFacts, endpoint: CoreEndpoint) -> None:
        self._core = core
        self._facts = facts
        self._endpoint = endpoint
        self._owner: dict[str, bytes] = {}  # request id -> front end
        self._is_stopping = False
        self._next_alive = 0.0
        core.on_result(endpoint.wake)
        core.sign_of_life = lambda: endpoint.broadcast(Alive(0.0))

    def stop(self) -> None:
        """End `run` soon (from any thread)."""
        self._is_stopping = True
        self._endpoint.wake()

    def run(self) -> None:
        """Serve.

        Raises:
            EngineError: the core died; every request has been told.
        """
        self._abort_requests_of(self._endpoint.broadcast(Ready(self._facts)))
        try:
            while not self._is_stopping:
                self.serve_once(ALIVE_SECONDS)
        finally:
            self._core.close_observers()

    def serve_once(self, timeout: float) -> None:
        """Plan, wait up to `timeout` seconds for news, and deal with them."""
        core = self._core
        if not core.is_async:
            self._take_commands(0.0)
        core.plan_ahead()
        if core.is_async or not core.has_result():
            self._take_commands(0.0 if core.has_result() else timeout)
        if core.has_result():
            self._send_outputs(core.digest())
        if core.failure is not None:
            raise EngineError(core.failure)
        if time.monotonic() >= self._next_alive:
            self._next_alive = time.monotonic() + ALIVE_SECONDS
            self._abort_requests_of(self._endpoint.broadcast(Alive(core.seconds_in_step())))

    def _take_commands(self, timeout: float) -> None:
        for client, command in self._endpoint.receive(timeout):
            self._handle(client, command)

    def _handle(self, client: bytes, command: Command) -> None:
        if isinstance(command, AddRequest):
            self._add(client, command.request)
        elif isinstance(command, AddRequests):
            for request in command.requests:
                self._add(client, request)
        elif isinstance(command, AbortRequests):
            self._abort(command.request_ids)
        elif isinstance(command, Hello):
            self._endpoint.send(client, Ready(self._facts))
        elif isinstance(command, Call):
            answer = answer_call(self._core, command)
            self._send_outputs(self._core.take_outputs())
            self._endpoint.send(client, answer)

    def _add(self, client: bytes, request: EngineRequest) -> None:
        admission = admit(self._core, request)
        if admission.refusal is None:
            self._owner[request.request_id] = client
        if not self._endpoint.send(client, admission):
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
        for client, news in by_client.items():
            if not self._endpoint.send(client, Outputs(news)):
                self._abort_requests_of([client])

    def _abort_requests_of(self, gone: list[bytes]) -> None:
        """Free what front ends left behind that went away."""
        if gone:
            self._abort([i for i, client in self._owner.items() if client in gone])


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
