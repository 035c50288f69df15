"""Server-sent events as a client reads them, one way for both kinds of iteration."""

import asyncio

import pytest

from girih.kernels.errors import EngineError
from girih.serve.sse import sse_events, sse_events_async

LINES = [": ping", "", "event: x", 'data: {"a": 1}', 'data:{"b": 2}', "data: ", "data: [DONE]"]


def read(lines):
    return list(sse_events(lines))


def read_async(lines):
    async def source():
        for line in lines:
            yield line

    async def collect():
        return [event async for event in sse_events_async(source())]

    return asyncio.run(collect())


@pytest.mark.parametrize("reader", [read, read_async])
def test_objects_come_up_to_the_end_mark(reader):
    assert reader([*LINES, 'data: {"late": 1}']) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("reader", [read, read_async])
@pytest.mark.parametrize("data", ['{"a": ', "[1]", "null", "<html>", "[" * 100_000])
def test_what_is_no_object_is_an_error_that_shows_it(reader, data):
    with pytest.raises(EngineError, match="no JSON object"):
        reader(["data: {}", f"data: {data}"])
