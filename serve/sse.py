"""Server-sent events as clients of OpenAI's routes read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

from girih.kernels.errors import EngineError

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


def _data(line: str) -> str:
    """What a line carries; empty for comments and other fields."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else ""


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise EngineError(f"the server sent an event that is no JSON object: {data[:200]!r}")
    return event
