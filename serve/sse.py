"""Server-sent events as clients of OpenAI's routes read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

from girih.kernels.base.errors import EngineError

DONE = "[DONE]"


def sse_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream up to its end mark.

    Raises:
        EngineError: the data of an event is no JSON object.
    """
    for line in lines:
        data = _data(line)
        if data == DONE:
            return
        if data:
            yield _parsed(data)


async def sse_events_async(lines: AsyncIterable[str]) -> AsyncIterator[dict[str, Any]]:
    """`sse_events` of lines that come asynchronously."""
    async for line in lines:
        data = _data(line)
        if data == DONE:
            return
        if data:
            yield _parsed(data)


class _Lines:
    """Lines of a text that comes in chunks. Only line feeds end one: httpx's own lines end at every
    separator of Unicode, which JSON may hold within a string."""

    def __init__(self) -> None:
        self._rest = ""

    def take(self, chunk: str) -> list[str]:
        """The lines that a chunk completes."""
        *lines, self._rest = (self._rest + chunk).split("\n")
        return [line.removesuffix("\r") for line in lines]


def sse_lines(chunks: Iterable[str]) -> Iterator[str]:
    """The lines of an event stream (`Response.iter_text`)."""
    lines = _Lines()
    for chunk in chunks:
        yield from lines.take(chunk)
    yield from lines.take("\n")


async def sse_lines_async(chunks: AsyncIterable[str]) -> AsyncIterator[str]:
    """`sse_lines` of chunks that come asynchronously."""
    lines = _Lines()
    async for chunk in chunks:
        for line in lines.take(chunk):
            yield line
    for line in lines.take("\n"):
        yield line


def _data(line: str) -> str:
    """Return the data of a line; empty for comments and other fields."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else ""


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise EngineError(f"the server sent an event that is no JSON object: {data[:200]!r}")
    return event
