"""A `CoreClient` whose caller waits, and every transport there is to try it with."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from support_core import collect
from support_socket_transport import SocketTransport

from girih.kernels.base.progress import Progress, no_progress
from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import LocalTransport, SteppedTransport
from girih.runtime.client.supervisor import ProcessTransport
from girih.runtime.client.transport import Gone, Transport
from girih.runtime.engine.core import EngineStats
from girih.runtime.records.messages import Admission
from girih.runtime.records.request import EngineOutput, EngineRequest

TRANSPORTS: dict[str, Any] = {
    "stepped": SteppedTransport,
    "thread": LocalTransport,
    "process": ProcessTransport,
    "socket": SocketTransport,
}


class WaitingClient:
    """Starts a core behind a transport and waits for each answer."""

    def __init__(self, transport: Transport, progress: Progress = no_progress) -> None:
        self.client = CoreClient(transport, progress)
        self.unfinished: dict[str, None] = {}
        self._outputs: deque[EngineOutput] = deque()
        self._admissions: deque[Admission] = deque()
        try:
            self.client.start()
            self._result(self.client.ready)
        except BaseException:
            self.client.close()
            raise

    def add(self, *requests: EngineRequest) -> None:
        """Hand over together; raises the first refusal, the others stay."""
        self.client.add(requests)
        self.unfinished |= dict.fromkeys(request.request_id for request in requests)
        refusals = []
        for _ in requests:
            while not self._admissions:
                self._receive()
            admission = self._admissions.popleft()
            if admission.refusal is not None:
                del self.unfinished[admission.request_id]
                refusals.append(admission.refusal)
        if refusals:
            raise refusals[0].as_error()

    def step(self) -> list[EngineOutput]:
        """What came, at least one record while requests are unfinished."""
        while self.unfinished and not self._outputs:
            self._receive()
        outputs = []
        while self._outputs:
            output = self._outputs.popleft()
            if output.request_id in self.unfinished:
                outputs.append(output)
                if output.finish_reason is not None:
                    del self.unfinished[output.request_id]
        return outputs

    def run_to_end(self) -> dict[str, Any]:
        """Everything that comes of the unfinished requests."""
        collected: dict[str, Any] = {}
        while self.unfinished:
            collect(collected, self.step())
        return collected

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests."""
        for request_id in request_ids:
            self.unfinished.pop(request_id, None)
        self.client.abort(request_ids)

    def call(self, method: str, **arguments: Any) -> Any:
        """See `CoreClient.call`."""
        return self._result(self.client.call(method, **arguments))

    def stats(self) -> EngineStats:
        """The core's counters, whether they were encoded on their way or not."""
        return msgspec.convert(msgspec.to_builtins(self.call("stats")), EngineStats)

    def close(self) -> None:
        """End it."""
        self.client.close()

    def _result(self, future: Future[Any]) -> Any:
        while not future.done():
            self._receive()
        return future.result()

    def _receive(self) -> None:
        self.client.wait(0.5)
        for event in self.client.poll():
            if isinstance(event, EngineOutput):
                self._outputs.append(event)
            elif isinstance(event, Admission):
                self._admissions.append(event)
            elif isinstance(event, Gone):
                self._outputs.extend(
                    EngineOutput(request_id=i, finish_reason="error", error=str(event.error))
                    for i in self.unfinished
                )
