"""The engine as the HTTP server sees it: one asynchronous stream of deltas per request.

    engine thread: records ─▶ pending list ─ call_soon_threadsafe ─▶ event loop
    event loop:    record ─▶ OutputProcessor ─▶ RequestStream (merges) ─▶ the handler

Detokenising happens on delivery, not on reading, so a stop string ends a request even when its
reader is slow; and since a stream merges, such a reader holds one delta, not a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from girih.kernels.errors import EngineError, QueueFullError, RequestError
from girih.runtime.request import EngineRequest
from girih.serve.detokenizer import Vocabulary
from girih.serve.engine_thread import Admission, Core, EngineThread, Record
from girih.serve.output_processor import Delta, OutputProcessor


class RequestStream:
    """The reader's end of one request: iterate it for deltas, close it to abort."""

    def __init__(self, engine: AsyncEngine, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self.processor = OutputProcessor(
            engine.vocabulary, request.sampling, request.prompt_token_ids
        )
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._waiting: Delta | None = None
        self._arrived = asyncio.Event()
        self._ended = False

    def put(self, delta: Delta) -> None:
        """Store news, merged with what was not read yet, and wake the reader."""
        if self._waiting is None:
            self._waiting = delta
        else:
            self._waiting.merge(delta)
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield deltas until the last one, which has a finish reason."""
        try:
            while not self._ended:
                await self._arrived.wait()
                self._arrived.clear()
                delta, self._waiting = self._waiting, None
                assert delta is not None, "the event is set only with a delta"
                self._ended = delta.finish_reason is not None
                yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Forget the request; aborts it in the core unless it ended."""
        self._engine.release(self)


@dataclass(frozen=True)
class EngineHealth:
    """Whether the engine makes progress.

    Attributes:
        alive: False after the engine died, or while a step is stuck.
        detail: why not.
    """

    alive: bool
    detail: str


class AsyncEngine:
    """Feeds an `EngineThread` and spreads its records over the readers.

    Made inside the running event loop.

    Args:
        core: the engine core; this object's thread owns it from now on.
        vocabulary: the tokenizer.
        on_death: called on the loop when the engine died.
    """

    def __init__(
        self,
        core: Core,
        vocabulary: Vocabulary,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.vocabulary = vocabulary
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, RequestStream] = {}
        self._pending: list[Record] = []
        self._pending_lock = threading.Lock()
        self._thread = EngineThread(core, self._post, self._post_death)
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests whose reader has not left."""
        return len(self._streams)

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the core and wait until it is admitted (at most one step).

        Raises:
            RequestError: the core can never serve it.
            QueueFullError: too many requests wait.
            EngineError: the engine died.
        """
        if request.request_id in self._streams:
            raise RequestError(
                f"request id {request.request_id!r} belongs to an unfinished request; "
                "use another one",
                param="request_id",
            )
        stream = RequestStream(self, request)
        # Registered before it is sent: the first record must find its reader.
        self._streams[request.request_id] = stream
        try:
            self._thread.add(request)
            await stream.admitted
        except BaseException:
            stream.close()
            raise
        return stream

    def release(self, stream: RequestStream) -> None:
        """Drop a stream (see `RequestStream.close`)."""
        if self._streams.get(stream.request_id) is not stream:
            return
        del self._streams[stream.request_id]
        if not stream.processor.finished:
            stream.processor.finished = True
            self._thread.abort([stream.request_id])

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

    def _post(self, records: list[Record]) -> None:
        """Called in the engine thread."""
        with self._pending_lock:
            scheduled = bool(self._pending)
            self._pending.extend(records)
        if not scheduled:
            self._call_loop(self._deliver)

    def _post_death(self, error: BaseException) -> None:
        """Called in the engine thread."""
        self._call_loop(lambda: self._die(error))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        # A closed loop has no readers left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self) -> None:
        with self._pending_lock:
            records, self._pending = self._pending, []
        stopped: list[str] = []
        for record in records:
            stream = self._streams.get(record.request_id)
            if stream is None or stream.processor.finished:
                continue  # late news of an aborted request
            if isinstance(record, Admission):
                _settle(stream, record)
                continue
            stream.put(stream.processor.process(record))
            if stream.processor.must_abort:
                stopped.append(record.request_id)
        if stopped:
            self._thread.abort(stopped)

    def _die(self, error: BaseException) -> None:
        self._fail_all(error)
        self._on_death(error)

    def _fail_all(self, error: BaseException) -> None:
        text = f"the engine stopped: {type(error).__name__}: {error}"
        for stream in self._streams.values():
            if stream.processor.finished:
                continue
            stream.processor.finished = True
            if stream.admitted.done():
                stream.put(Delta(finish_reason="error", error=text))
            else:
                stream.admitted.set_exception(EngineError(text))


def _settle(stream: RequestStream, record: Admission) -> None:
    """Let the submitter go on, or tell it why not."""
    if stream.admitted.done():
        return
    if record.refusal is None:
        stream.admitted.set_result(None)
        return
    stream.processor.finished = True
    if record.refusal == "request":
        stream.admitted.set_exception(RequestError(record.message, record.param))
    elif record.refusal == "queue_full":
        stream.admitted.set_exception(QueueFullError(record.message))
    else:
        stream.admitted.set_exception(EngineError(record.message))
