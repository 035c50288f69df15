"""The engine as the HTTP server sees it: one asynchronous stream of deltas per request.

    engine thread: records ─▶ pending list ─ call_soon_threadsafe ─▶ event loop
    event loop:    record ─▶ OutputProcessor ─▶ Collector (merges) ─▶ the handler's `async for`

Detokenising happens on delivery, not on reading, so a stop string ends a request even when its
reader is slow; and since a collector merges, such a reader holds one delta, not a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from girih.kernels.errors import EngineError
from girih.runtime.request import EngineOutput, EngineRequest
from girih.serve.detokenizer import Vocabulary
from girih.serve.engine_thread import Core, EngineThread
from girih.serve.output_processor import Delta, OutputProcessor


class Collector:
    """One reader's mailbox of size one: later deltas merge into the one that waits."""

    def __init__(self, processor: OutputProcessor) -> None:
        self.processor = processor
        self._waiting: Delta | None = None
        self._arrived = asyncio.Event()

    def put(self, delta: Delta) -> None:
        """Store or merge a delta and wake the reader."""
        if self._waiting is None:
            self._waiting = delta
        else:
            self._waiting.merge(delta)
        self._arrived.set()

    async def get(self) -> Delta:
        """Wait for news and take all of it."""
        await self._arrived.wait()
        self._arrived.clear()
        delta, self._waiting = self._waiting, None
        assert delta is not None, "the event is set only with a delta"
        return delta


@dataclass(frozen=True)
class EngineHealth:
    """Whether the engine makes progress.

    Attributes:
        alive: False after the engine died.
        detail: why not, or how long the running step takes.
    """

    alive: bool
    detail: str


class AsyncEngine:
    """Feeds an `EngineThread` and spreads its records over the readers.

    Made inside the running event loop.
    """

    def __init__(self, core: Core, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._loop = asyncio.get_running_loop()
        self._collectors: dict[str, Collector] = {}
        self._pending: list[EngineOutput] = []
        self._pending_lock = threading.Lock()
        self._thread = EngineThread(core, self._post, self._post_death)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._collectors)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        """Yield the deltas of `request`; leaving the loop early aborts it.

        Raises:
            EngineError: the engine died or cannot take the request.
        """
        collector = Collector(
            OutputProcessor(self._vocabulary, request.sampling, request.prompt_token_ids)
        )
        # Registered before it is sent: the first record must find its reader.
        self._collectors[request.request_id] = collector
        finished = False
        try:
            self._thread.add(request)
            while not finished:
                delta = await collector.get()
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if self._collectors.pop(request.request_id, None) is not None and not finished:
                self._thread.abort([request.request_id])

    def health(self, stall_seconds: float) -> EngineHealth:
        """Say whether the engine lives and its running step is not stuck."""
        if self._thread.error is not None:
            return EngineHealth(False, f"the engine died: {type(self._thread.error).__name__}")
        seconds = self._thread.seconds_in_step()
        if seconds > stall_seconds:
            return EngineHealth(False, f"a step has been running for {seconds:.0f} s")
        return EngineHealth(True, "ok")

    def close(self) -> None:
        """End the engine thread; readers get an error."""
        self._thread.close()
        self._fail_all(EngineError("the server is shutting down"))

    def _post(self, outputs: list[EngineOutput]) -> None:
        """Called in the engine thread."""
        with self._pending_lock:
            scheduled = bool(self._pending)
            self._pending.extend(outputs)
        if not scheduled:
            self._call_loop(self._deliver)

    def _post_death(self, error: BaseException) -> None:
        """Called in the engine thread."""
        self._call_loop(lambda: self._fail_all(error))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        # A closed loop has no readers left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self) -> None:
        with self._pending_lock:
            outputs, self._pending = self._pending, []
        stopped: list[str] = []
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is None or collector.processor.finished:
                continue  # late news of an aborted request
            collector.put(collector.processor.process(output))
            if collector.processor.must_abort:
                stopped.append(output.request_id)
        if stopped:
            self._thread.abort(stopped)

    def _fail_all(self, error: BaseException) -> None:
        for collector in self._collectors.values():
            if not collector.processor.finished:
                collector.processor.finished = True
                collector.put(Delta(finish_reason="error", error=f"the engine stopped: {error}"))
