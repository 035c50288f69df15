"""The engine as the HTTP server sees it: one asynchronous stream of deltas per request.

    core ─▶ CoreClient ─▶ events ─▶ OutputProcessor ─▶ RequestStream (merges) ─▶ the handler

Detokenising happens on delivery, not on reading, so a stop string ends a request even when its
reader is slow; and since a stream merges, such a reader holds one delta, not a queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from girih.kernels.base.errors import EngineError, RequestError
from girih.runtime.client.client import Back, CoreClient, Event, Lost
from girih.runtime.client.transport import Gone
from girih.runtime.isolation import describe, each
from girih.runtime.records.messages import Admission, EngineFacts
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.serve.text.detokenizer import Vocabulary
from girih.serve.text.output_processor import Delta, OutputProcessor

logger = logging.getLogger(__name__)

MAX_LOSSES = 2  # cores that may end while a request is theirs; it may be what ends them


class RequestStream:
    """The reader's end of one request: iterate it for deltas, close it to abort.

    Attributes:
        request: what was asked.
        has_started: whether the core said anything of it but that it was admitted.
        num_losses: cores that ended while the request waited or ran there.
        processor: makes the deltas.
        admitted: done when the core took the request in, or refused it.
    """

    def __init__(self, engine: AsyncEngine, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self.request = request
        self.has_started = False
        self.num_losses = 0
        assert engine.vocabulary is not None, "a server sets it before it takes requests"
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
    """The engine's health: whether it makes progress.

    Attributes:
        alive: False after the engine died, or while a step is stuck.
        ready: whether it takes requests.
        detail: why not.
    """

    alive: bool
    ready: bool
    detail: str


class AsyncEngine:
    """Feeds a core and spreads its records over the readers; used on one event loop.

    Args:
        client: the way to the core; whoever made it closes it.
        on_death: called when the core is gone for good.

    Attributes:
        vocabulary: the tokenizer, set before the first request.
    """

    def __init__(
        self,
        client: CoreClient,
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.vocabulary: Vocabulary | None = None
        self._tell_death = on_death
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._is_lost = False
        self._is_open = True
        self._streams: dict[str, RequestStream] = {}
        self._loop.add_reader(client.fileno(), self._receive)
        self._loop.call_soon(self._receive)

    async def ready(self) -> EngineFacts:
        """Wait until the core takes requests.

        Raises:
            GirihError: it could not be built.
        """
        return await asyncio.wrap_future(self._client.ready)

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
            self._client.add([request])
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
            self._abort([stream.request_id])

    def abort(self, name: str | None = None) -> int:
        """End the requests of one HTTP request, or all; readers get finish reason "abort".

        Args:
            name: the request id that clients see; ids here are NAME-prompt-choice-random.

        Returns:
            How many were running.
        """
        return self.end(
            [
                stream
                for stream in self._streams.values()
                if name in (None, stream.request_id.rsplit("-", 3)[0])
            ]
        )

    def end(self, streams: Sequence[RequestStream]) -> int:
        """End requests as `abort` does; returns how many were running."""
        ended = [s for s in streams if s.admitted.done() and not s.processor.finished]
        for stream in ended:
            stream.processor.finished = True
            stream.put(Delta(finish_reason="abort"))
        if ended:
            self._abort([stream.request_id for stream in ended])
        return len(ended)

    async def call(self, method: str, **arguments: Any) -> Any:
        """Have the core do something (see `runtime/client/control.py`).

        Raises:
            GirihError: it refused, failed, or is not there.
        """
        answer = self._client.call(method, **arguments)
        return await asyncio.wrap_future(answer)

    async def stats(self) -> dict[str, Any]:
        """Return the core's `EngineStats` as plain data; raises as `call`."""
        stats: dict[str, Any] = msgspec.to_builtins(await self.call("stats"))
        return stats

    def health(self, stall_seconds: float) -> EngineHealth:
        """Say whether the engine lives and its running step is not stuck."""
        error = self._client.error
        if error is not None:
            return EngineHealth(False, False, f"the engine died: {type(error).__name__}")
        if self._is_lost:
            return EngineHealth(True, False, "the engine is being started again")
        seconds = self._client.seconds_stuck()
        if seconds > stall_seconds:
            return EngineHealth(False, False, f"a step has been running for {seconds:.0f} s")
        return EngineHealth(True, True, "ok")

    def fail_all(self, reason: str) -> None:
        """End every request with an error."""
        text = f"the engine stopped: {reason}"
        running = [s for s in self._streams.values() if not s.processor.finished]
        for stream in running:
            self._fail(stream, text)
        if running:
            self._abort([stream.request_id for stream in running])

    def close(self) -> None:
        """Listen to the core no more; readers get an error. Closing twice is harmless."""
        if self._is_open:
            self.fail_all("the server is shutting down")
            self._is_open = False
            self._loop.remove_reader(self._client.fileno())

    def _abort(self, request_ids: list[str]) -> None:
        if self._is_open:
            self._client.abort(request_ids)

    def _receive(self) -> None:
        """Spread what came over the streams; a record that cannot be taken fails alone."""
        if not self._is_open:
            return
        stopped: list[str] = []

        def take(event: Event) -> None:
            if isinstance(event, EngineOutput):
                if self._put(event):
                    stopped.append(event.request_id)
            elif isinstance(event, Admission):
                self._settle(event)
            elif isinstance(event, Lost):
                self._on_lost()
            elif isinstance(event, Back):
                self._on_back()
            elif isinstance(event, Gone):
                self._on_death(event.error)

        def fail(event: Event, error: Exception) -> None:
            logger.error("a record of the core cannot be taken", exc_info=error)
            name = getattr(event, "request_id", None)
            stream = self._streams.get(name) if name is not None else None
            if stream is not None and not stream.processor.finished:
                self._fail(stream, describe(error), "generation_failed")
                stopped.append(stream.request_id)

        each(self._client.poll(), take, fail)
        if stopped:
            self._abort(stopped)

    def _on_lost(self) -> None:
        """End the requests that had tokens, or lost a core before; the others wait for the next."""
        self._is_lost = True
        for stream in list(self._streams.values()):
            if stream.processor.finished:
                continue
            stream.num_losses += 1
            if stream.has_started:
                self._fail(stream, "the engine stopped: its process ended")
            elif stream.num_losses >= MAX_LOSSES:
                self._give_up(stream)

    def _on_back(self) -> None:
        """Hand over again what waits."""
        self._is_lost = False
        self._client.add(
            [stream.request for stream in self._streams.values() if not stream.processor.finished]
        )

    def _on_death(self, error: BaseException) -> None:
        """End every request and tell the owner."""
        self.fail_all(f"{type(error).__name__}: {error}")
        self._tell_death(error)

    def _put(self, output: EngineOutput) -> bool:
        """Turn a record into a delta; whether the core must be told to stop."""
        stream = self._streams.get(output.request_id)
        if stream is None or stream.processor.finished:
            return False  # late news of an aborted request
        stream.has_started = True
        stream.put(stream.processor.process(output))
        return stream.processor.must_abort

    def _settle(self, admission: Admission) -> None:
        """Let the submitter go on, or tell it why not."""
        stream = self._streams.get(admission.request_id)
        if stream is None or stream.processor.finished:
            return
        refusal = admission.refusal
        if stream.admitted.done():  # handed over again to another core
            if refusal is not None:
                self._fail(stream, f"the engine was started again: {refusal.message}")
        elif refusal is None:
            stream.admitted.set_result(None)
        else:
            stream.processor.finished = True
            stream.admitted.set_exception(refusal.as_error())

    def _give_up(self, stream: RequestStream) -> None:
        """Fail a request that may be what ends cores; no client should send it again."""
        stream.processor.finished = True
        if not stream.admitted.done():
            stream.admitted.set_result(None)  # its reader is told, as one that was admitted
        text = (
            f"the engine's process ended {stream.num_losses} times while this request waited or "
            "ran; it is not handed over again"
        )
        stream.put(Delta(finish_reason="error", error=text, code="given_up"))

    def _fail(self, stream: RequestStream, text: str, code: str = "engine_error") -> None:
        stream.processor.finished = True
        if stream.admitted.done():
            stream.put(Delta(finish_reason="error", error=text, code=code))
        else:
            stream.admitted.set_exception(EngineError(text))
