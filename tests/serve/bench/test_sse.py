"""Server-sent events as a client reads them, one way for both kinds of iteration."""

import asyncio
import json

import pytest

from girih.kernels.base.errors import EngineError
from girih.serve.http.generation.streaming import event
from girih.serve.sse import sse_events, sse_events_async, sse_lines, sse_lines_async

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


ODD = "a\u2028b\u2029c\x85d\x0be\x1cf é 𝄞"


def lines(chunks):
    return list(sse_lines(chunks))


def lines_async(chunks):
    async def source():
        for chunk in chunks:
            yield chunk

    async def collect():
        return [line async for line in sse_lines_async(source())]

    return asyncio.run(collect())


@pytest.mark.parametrize("split", [lines, lines_async])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_only_line_feeds_end_a_line(split, size):
    text = f"data: {json.dumps({'t': ODD}, ensure_ascii=False)}\r\n\ndata: [DONE]"
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    found = split(chunks)
    assert [line for line in found if line] == text.replace("\r", "").split("\n\n")
    assert read(found) == [{"t": ODD}]


def test_an_event_stays_one_line_for_clients_that_split_anywhere():
    data = event({"t": ODD}).decode()
    assert data.splitlines() == [data.removesuffix("\n\n"), ""]
    assert json.loads(data.removeprefix("data: ")) == {"t": ODD}
    assert "é 𝄞" in data
