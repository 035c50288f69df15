"""A core in another process that looks like one in this process (for scripts, one thread).

    add_requests ─▶ AddRequests … Admissions        step ─▶ waits for the next Outputs

Several steps of the core may come back as one `step` here, since it does not wait for its reader.
What is to run in one batch is handed over together: while a core without asynchronous scheduling
runs a step it answers nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from girih.kernels.base.errors import EngineError
from girih.kernels.base.progress import Progress as ProgressObserver
from girih.runtime.client.core_connection import CoreConnection, Disconnected
from girih.runtime.client.core_process import Build, CoreSupervisor
from girih.runtime.engine.core import EngineStats
from girih.runtime.records.messages import (
    AbortRequests,
    AddRequests,
    Admission,
    Answer,
    Call,
    Died,
    EngineFacts,
    Message,
    Outputs,
    Progress,
    Ready,
    Refusal,
)
from girih.runtime.records.request import EngineOutput, EngineRequest

WAIT_SECONDS = 0.5  # between looks whether the core's process still lives


class RemoteCore:
    """Starts a core in a process of its own and waits until it is ready.

    Args:
        build: makes the engine there; it must be picklable.
        progress: observer of the start-up work.

    Attributes:
        facts: what the core says of itself.
        failure: why it died, or None.

    Raises:
        GirihError: what building raised.
    """

    def __init__(self, build: Build, progress: ProgressObserver) -> None:
        self.failure: str | None = None
        self._is_closed = False
        self._error: Exception | None = None
        self._unfinished: dict[str, None] = {}
        self._outputs: deque[EngineOutput] = deque()
        self._received: deque[Message | Disconnected] = deque()  # and not looked at yet
        self._next_call = 0
        self._supervisor = CoreSupervisor(build, restart=False, on_end=self._set_error)
        self._connection = CoreConnection(self._supervisor.address)
        self._supervisor.start()
        try:
            self.facts = self._await_ready(progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the core's process; closing twice does no harm."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.close()
            self._supervisor.stop()

    def add_request(self, request: EngineRequest) -> None:
        """See `EngineCore.add_request`."""
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests before the next step; when some are refused, the others stay.

        Raises:
            As `EngineCore.add_request`, for the first that was refused.
        """
        self._check_alive()
        self._connection.send(AddRequests(list(requests)))
        self._unfinished |= dict.fromkeys(request.request_id for request in requests)
        refused: list[Refusal] = []
        for _ in requests:
            admission = self._await(lambda m: isinstance(m, Admission))
            assert isinstance(admission, Admission)
            if admission.refusal is not None:
                del self._unfinished[admission.request_id]
                refused.append(admission.refusal)
        if refused:
            raise refused[0].as_error()

    def abort(self, request_ids: list[str]) -> None:
        """See `EngineCore.abort`; the core tells nothing more of these requests."""
        for request_id in request_ids:
            self._unfinished.pop(request_id, None)
        self._connection.send(AbortRequests(request_ids))

    def has_work(self) -> bool:
        """See `EngineCore.has_work`."""
        return bool(self._unfinished)

    def step(self) -> list[EngineOutput]:
        """Wait for news; see `EngineCore.step`."""
        while self._unfinished and not self._outputs:
            if not self._received:
                self._received.extend(self._next_messages())
            while self._received:
                self._note(self._received.popleft())
        outputs = []
        while self._outputs:
            output = self._outputs.popleft()
            if output.request_id not in self._unfinished:
                continue  # it was aborted, or a core that died has told its end already
            outputs.append(output)
            if output.finish_reason is not None:
                del self._unfinished[output.request_id]
        return outputs

    def reset_prefix_cache(self) -> None:
        """See `EngineCore.reset_prefix_cache`."""
        self.call("reset_prefix_cache")

    def check_integrity(self) -> None:
        """See `EngineCore.check_integrity`."""
        self.call("check_integrity")

    def stats(self) -> EngineStats:
        """See `EngineCore.stats`."""
        return msgspec.convert(self.call("stats"), EngineStats)

    def call(self, method: str, **arguments: Any) -> Any:
        """Have the core do something (see `control.py`).

        Raises:
            GirihError: it refused, failed or died.
        """
        self._next_call += 1
        number = self._next_call
        self._check_alive()
        self._connection.send(Call(number, method, arguments))
        answer = self._await(lambda m: isinstance(m, Answer) and m.call_id == number)
        assert isinstance(answer, Answer)
        if answer.refusal is not None:
            raise answer.refusal.as_error()
        return answer.value

    def _await(self, is_answer: Callable[[Message], bool]) -> Message:
        """Wait for an answer; everything else that comes is noted, what comes behind it is kept."""
        while True:
            if not self._received:
                self._received.extend(self._next_messages())
            while self._received:
                message = self._received.popleft()
                if not isinstance(message, Disconnected) and is_answer(message):
                    return message
                self._note(message)
            self._check_alive()

    def _next_messages(self) -> list[Message | Disconnected]:
        self._connection.wait(WAIT_SECONDS)
        received = self._connection.receive()
        if not received and self._error is not None:
            return [Disconnected()]
        return received

    def _note(self, message: Message | Disconnected) -> None:
        if isinstance(message, Outputs):
            self._outputs.extend(message.outputs)
        elif isinstance(message, Died):
            self._die(message.refusal.message)
        elif isinstance(message, Disconnected):
            self._die("the engine process ended")

    def _die(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self._outputs.extend(
                EngineOutput(request_id=i, finish_reason="error", error=reason)
                for i in self._unfinished
            )

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine core died: {self.failure}")

    def _set_error(self, error: Exception) -> None:
        """Called in the supervisor's thread."""
        self._error = error

    def _await_ready(self, progress: ProgressObserver) -> EngineFacts:
        while True:
            for message in self._next_messages():
                if isinstance(message, Ready):
                    return message.facts
                if isinstance(message, Progress):
                    progress(message.as_event())
                elif isinstance(message, Died):
                    raise message.refusal.as_error()
            if self._error is not None:
                raise self._error
