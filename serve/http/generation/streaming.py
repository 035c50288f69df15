"""Many request streams to one HTTP response, streamed or whole; a disconnect ends them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from girih.runtime.records.request import EngineRequest
from girih.runtime.structured.backends import check as check_structured
from girih.serve.engine.async_engine import AsyncEngine, RequestStream
from girih.serve.http.base.errors import ApiError, as_api_error
from girih.serve.http.generation.protocol import StreamOptions
from girih.serve.http.generation.requests import Usage
from girih.serve.text.output_processor import Delta

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_LINE_ENDS = [(c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029"]


def event(body: Any) -> bytes:
    """Encode one server-sent event.

    Characters that some clients (httpx's `iter_lines`) take for the end of a line are escaped.
    """
    data = msgspec.json.encode(body)
    for character, escaped in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escaped)
    return b"data: " + data + b"\n\n"


async def submit_all(engine: AsyncEngine, requests: Sequence[EngineRequest]) -> list[RequestStream]:
    """Submit requests together; when one is refused the others are aborted.

    Raises:
        GirihError: the first refusal.
    """
    forms = {r.sampling.structured for r in requests if r.sampling.structured is not None}
    for form in forms:  # a large schema takes a while to read
        await asyncio.to_thread(check_structured, form)
    results = await asyncio.gather(
        *(engine.submit(request) for request in requests), return_exceptions=True
    )
    streams = [result for result in results if isinstance(result, RequestStream)]
    for result in results:
        if isinstance(result, BaseException):
            close_all(streams)
            raise result
    return streams


def close_all(streams: Sequence[RequestStream]) -> None:
    """Abort whatever has not ended."""
    for stream in streams:
        stream.close()


async def collect(streams: Sequence[RequestStream]) -> list[Delta]:
    """Return everything each stream says, merged.

    Raises:
        ApiError: 500, one of them failed in the engine.
    """

    async def whole(stream: RequestStream) -> Delta:
        total = Delta()
        async for delta in stream:
            total.merge(delta)
        raise_if_failed(total)
        return total

    try:
        return list(await asyncio.gather(*(whole(stream) for stream in streams)))
    finally:
        close_all(streams)


def raise_if_failed(delta: Delta) -> None:
    """Raise `ApiError` (500) for a delta that reports a failure."""
    if delta.finish_reason == "error":
        raise ApiError(500, f"generation failed: {delta.error}", code=delta.code)


async def interleave(
    streams: Sequence[RequestStream], keep_alive_seconds: float, interval: int = 1
) -> AsyncIterator[tuple[int, Delta] | None]:
    """Yield (index of the stream, delta) as they come; None after a silence.

    Args:
        streams: what to read.
        keep_alive_seconds: how long a silence may last.
        interval: hand a delta on only when it has this many tokens (or is the last).
    """
    # One slot: while the client is slow, deltas merge in their streams instead of queueing here.
    queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: RequestStream) -> None:
        held = Delta()
        async for delta in stream:
            held.merge(delta)
            if len(held.token_ids) >= interval or held.finish_reason is not None:
                await queue.put((index, held))
                held = Delta()

    pumps = [asyncio.create_task(pump(*pair)) for pair in enumerate(streams)]
    remaining = len(streams)
    try:
        while remaining:
            try:
                # not `wait_for`: in Python 3.11 it swallows a cancellation that comes with an item
                async with asyncio.timeout(keep_alive_seconds):
                    index, delta = await queue.get()
            except TimeoutError:
                yield None
                continue
            remaining -= delta.finish_reason is not None
            yield index, delta
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


class ChoiceWriter(Protocol):
    """Writes an answer that is made of choices."""

    head: dict[str, Any]
    usage: Usage

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return what is new in a choice, and count it."""


class StreamedBody(Protocol):
    """Fields of a request that concern its stream."""

    stream_options: StreamOptions | None
    stream_interval: int | None


async def choice_events(
    writer: ChoiceWriter,
    streams: Sequence[RequestStream],
    body: StreamedBody,
    keep_alive_seconds: float,
) -> AsyncIterator[bytes]:
    """Yield the events of a streamed answer: a chunk per news, the usage, the end."""
    options = body.stream_options or StreamOptions()
    try:
        async for item in interleave(streams, keep_alive_seconds, body.stream_interval or 1):
            if item is None:
                yield KEEP_ALIVE
                continue
            index, delta = item
            raise_if_failed(delta)
            chunk = {**writer.head, "choices": [writer.choice(index, delta)]}
            yield event({**chunk, **writer.usage.of_chunk(options)})
        if options.include_usage:
            yield event({**writer.head, "choices": [], "usage": writer.usage.body()})
    except Exception as error:  # the status line is sent: tell it in the stream
        yield event(as_api_error(error).body())
    yield DONE


async def run_until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Await `work`, or cancel it and return None when the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _cancel(task, gone)


class EventStream(Response):
    """A server-sent event response that closes its request streams however it ends."""

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        streams: Sequence[RequestStream],
        headers: dict[str, str],
    ) -> None:
        super().__init__(
            status_code=200,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no", **headers},
        )
        del self.headers["content-length"]
        self._chunks = chunks
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the last one or until the client goes away."""
        sender = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            close_all(self._streams)
            await _cancel(sender, gone)

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with contextlib.aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
