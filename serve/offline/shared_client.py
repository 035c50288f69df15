"""One core that several batches of a program use at once, from any thread.

    batch A ─ submit, wait ─╮                             ╭─▶ A's outputs
    batch B ─ submit, wait ─┴─▶ CoreClient.wait (locked) ─┴─▶ B's outputs, kept until B asks

There is no thread of its own: whoever waits takes in what comes, for everybody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from girih.kernels.base.errors import EngineError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.transport import Gone
from girih.runtime.records.messages import Admission, EngineFacts
from girih.runtime.records.request import EngineOutput, EngineRequest

WAIT_SECONDS = 0.5  # a core in this process makes a step meanwhile, one elsewhere may have died


class SharedClient:
    """Waits for whoever asks, and hands each batch its own outputs.

    Args:
        client: the way to the core; only this object uses it, and closes it.
    """

    def __init__(self, client: CoreClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._outputs: dict[str, deque[EngineOutput]] = {}  # request id -> its batch's
        self._admissions: dict[str, Admission] = {}
        self._dropped: deque[str] = deque()  # to abort before the core is asked for anything
        self._is_closed = False

    def start(self) -> EngineFacts:
        """Start the core, or connect to it, and wait until it takes requests.

        Raises:
            GirihError: it could not be built.
        """
        self._client.start()
        self._wait_for(self._client.ready)
        return self._client.facts

    def submit(self, requests: Sequence[EngineRequest]) -> deque[EngineOutput]:
        """Queue the requests of one batch; returns where their outputs will be (see `wait`).

        Raises:
            GirihError: one is refused, or the engine died or is closed; none of them runs then.
        """
        outputs: deque[EngineOutput] = deque()
        ids = [request.request_id for request in requests]
        try:
            with self._lock:
                self._prepare()
                self._client.add(requests)
                self._outputs.update(dict.fromkeys(ids, outputs))
                self._await_admissions(ids)
        except BaseException:
            self.abort(ids)
            raise
        return outputs

    def wait(self, outputs: deque[EngineOutput]) -> list[EngineOutput]:
        """Return what there is for a batch; waits for the core's next messages if there is nothing.

        Args:
            outputs: what `submit` returned for it.

        Returns:
            At least one record, or none when the messages were about other batches only.

        Raises:
            EngineError: the engine died or is closed.
        """
        with self._lock:
            self._prepare()
            if not outputs:
                self._check_alive()
                self._receive()
            found = list(outputs)
            outputs.clear()
            return found

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests before the next step; never waits for another thread.

        So it may be called while this very thread makes a step: by a generator that is collected.
        """
        self._dropped.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def call(self, method: str, **arguments: Any) -> Any:
        """Have the core do something between two steps (see `runtime/client/control.py`).

        Raises:
            GirihError: it refused, failed, died, or is closed.
        """
        with self._lock:
            self._prepare()
            return self._wait_for(self._client.call(method, **arguments))

    def close(self) -> None:
        """End the core; whoever waits for outputs gets an error. Closing twice does no harm."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._client.close()

    def _prepare(self) -> None:
        """Before the core is asked for anything; the lock is held."""
        if self._is_closed:
            raise EngineError("the engine was closed; make a new LLM")
        self._drop()

    def _drop(self) -> None:
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        running = [i for i in dropped if self._outputs.pop(i, None) is not None]
        if running and not self._is_closed:
            self._client.abort(running)

    def _await_admissions(self, ids: list[str]) -> None:
        while not all(i in self._admissions for i in ids):
            self._check_alive()
            self._receive()
        refusals = [self._admissions.pop(i).refusal for i in ids]
        for refusal in refusals:
            if refusal is not None:
                raise refusal.as_error()

    def _wait_for(self, answer: Future[Any]) -> Any:
        while not answer.done():
            self._receive()
        return answer.result()

    def _check_alive(self) -> None:
        if self._client.error is not None:
            raise EngineError(f"the engine core died: {self._client.error}")

    def _receive(self) -> None:
        self._client.wait(WAIT_SECONDS)
        for event in self._client.poll():
            if isinstance(event, EngineOutput):
                self._deliver(event)
            elif isinstance(event, Admission):
                self._admissions[event.request_id] = event
            elif isinstance(event, Gone):
                for name in list(self._outputs):
                    self._deliver(
                        EngineOutput(request_id=name, finish_reason="error", error=str(event.error))
                    )

    def _deliver(self, output: EngineOutput) -> None:
        ended = output.finish_reason is not None
        find = self._outputs.pop if ended else self._outputs.get
        found = find(output.request_id, None)
        if found is not None:  # else it was aborted as this step ran
            found.append(output)
