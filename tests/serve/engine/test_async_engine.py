"""Readers and the engine thread, without HTTP."""

import asyncio
import os

import pytest
import support_tokenizer
from support_core import make_request
from support_fake_runner import fake_generate
from support_serving import fake_engine

from girih.kernels.base.errors import EngineError, RequestError
from girih.runtime.client.client import Back, CoreClient, Lost
from girih.runtime.client.local_transport import LocalTransport
from girih.serve.engine.async_engine import AsyncEngine
from girih.serve.http.generation.streaming import interleave
from girih.serve.text.output_processor import Delta, OutputProcessor

TOKENIZER = support_tokenizer.byte_level()


def run(scenario, **options):
    """Run `scenario(engine, core)` on a loop with an engine thread; checks blocks at the end."""
    built = fake_engine(TOKENIZER, **options)

    async def main():
        client = CoreClient(LocalTransport(lambda progress: built))
        client.start()
        engine = AsyncEngine(client)
        try:
            await engine.ready()
            engine.vocabulary = TOKENIZER
            return await scenario(engine, built.core)
        finally:
            engine.close()
            client.close()
            built.core.check_integrity()

    return asyncio.run(main())


async def read(stream):
    return [delta async for delta in stream]


def test_a_slow_reader_holds_one_delta_and_blocks_nobody():
    async def scenario(engine, core):
        slow = await engine.submit(make_request("slow", max_tokens=60))
        fast = await engine.submit(make_request("fast", max_tokens=60))
        await read(fast)
        while core.has_work():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return await read(slow)

    (only,) = run(scenario)
    assert len(only.token_ids) == 60
    assert only.finish_reason == "length"


def test_a_stop_string_ends_a_request_whose_reader_sleeps():
    async def scenario(engine, core):
        whole = await read(await engine.submit(make_request("a", max_tokens=80)))
        text = "".join(delta.text for delta in whole)
        stream = await engine.submit(make_request("a", max_tokens=80, stop=(text[6:9],)))
        while not stream.processor.finished:
            await asyncio.sleep(0.005)
        while core.has_work():
            await asyncio.sleep(0.005)
        return text, core.stats().finished, await read(stream)

    text, finished, deltas = run(scenario, step_seconds=0.002)
    assert finished["abort"] == 1
    assert "".join(delta.text for delta in deltas) == text[: text.index(text[6:9])]


def test_closing_a_stream_aborts_and_its_id_is_free_again():
    async def scenario(engine, core):
        stream = await engine.submit(make_request("a", max_tokens=200))
        with pytest.raises(RequestError, match="unfinished"):
            await engine.submit(make_request("a"))
        stream.close()
        stream.close()
        while core.has_work():
            await asyncio.sleep(0.005)
        assert engine.num_requests == 0
        assert core.stats().finished["abort"] == 1
        assert core.stats().num_steps < 100
        return await read(await engine.submit(make_request("a", max_tokens=2)))

    assert run(scenario, step_seconds=0.005)[-1].finish_reason == "length"


def test_a_submitter_that_is_cancelled_leaves_nothing():
    async def scenario(engine, core):
        running = await engine.submit(make_request("first", max_tokens=3))
        task = asyncio.create_task(engine.submit(make_request("a", max_tokens=200)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await read(running)
        while core.has_work():
            await asyncio.sleep(0.005)
        return engine.num_requests

    assert run(scenario, step_seconds=0.05) == 0


def test_what_the_core_refuses_is_raised_to_the_submitter():
    async def scenario(engine, core):
        with pytest.raises(RequestError, match="prompt"):
            await engine.submit(make_request("long", 300))
        return engine.num_requests

    assert run(scenario) == 0


def test_an_output_that_cannot_be_read_fails_its_request_alone(monkeypatch, caplog):
    def process(self, output, real=OutputProcessor.process):
        if output.request_id == "culprit" and output.new_token_ids:
            raise ValueError("injected")
        return real(self, output)

    async def scenario(engine, core):
        names = ["a", "culprit", "b"]
        requests = [make_request(name, max_tokens=30) for name in names]
        streams = await asyncio.gather(*(engine.submit(request) for request in requests))
        deltas = await asyncio.gather(*(read(stream) for stream in streams))
        while core.has_work():
            await asyncio.sleep(0.005)
        return dict(zip(names, deltas, strict=True)), core.stats().finished

    monkeypatch.setattr(OutputProcessor, "process", process)
    deltas, finished = run(scenario, step_seconds=0.005)
    assert (deltas["culprit"][-1].finish_reason, deltas["culprit"][-1].error) == (
        "error",
        "ValueError: injected",
    )
    for name in "ab":
        tokens = [token for delta in deltas[name] for token in delta.token_ids]
        assert tokens == fake_generate(make_request(name, max_tokens=30), TOKENIZER.vocab_size, 256)
        assert deltas[name][-1].finish_reason == "length"
    assert finished == {"length": 2, "abort": 1}


def test_death_reaches_readers_and_later_submitters():
    async def scenario(engine, core):
        requests = [make_request(str(i), max_tokens=50) for i in range(3)]
        streams = await asyncio.gather(*(engine.submit(request) for request in requests))
        results = await asyncio.gather(*(read(stream) for stream in streams))
        while engine.health(10).alive:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineError, match="died"):
            await engine.submit(make_request("late"))
        return results

    for deltas in run(scenario, fail_at={6: EngineError("device lost")}, step_seconds=0.02):
        assert deltas[-1].finish_reason == "error"
        assert "device lost" in deltas[-1].error


def test_an_error_that_escapes_the_core_reaches_readers():
    async def scenario(engine, core):
        stream = await engine.submit(make_request("a", max_tokens=50))
        return await read(stream)

    deltas = run(scenario, fail_at={2: KeyboardInterrupt()})
    assert deltas[-1].finish_reason == "error"


class SilentClient:
    """A client whose core says only what a test has it say."""

    error = None

    def __init__(self):
        self.readable = os.eventfd(0)
        self.added = []
        self.events = []

    def fileno(self):
        return self.readable

    def poll(self):
        events, self.events = self.events, []
        return events

    def add(self, requests):
        self.added += [request.request_id for request in requests]

    def abort(self, request_ids):
        pass


def test_a_request_goes_to_two_cores_at_most_admitted_or_not():
    async def scenario():
        client = SilentClient()
        engine = AsyncEngine(client)
        engine.vocabulary = TOKENIZER

        async def come(*events):
            client.events += events
            engine._receive()
            await asyncio.sleep(0)

        first = asyncio.create_task(engine.submit(make_request("first")))
        await asyncio.sleep(0)
        await come(Lost(), Back())
        second = asyncio.create_task(engine.submit(make_request("second")))
        await asyncio.sleep(0)
        await come(Lost(), Back())
        [delta] = await read(await first)
        assert (delta.finish_reason, delta.code) == ("error", "given_up")
        assert client.added == ["first", "first", "second", "second"]
        engine.close()
        with pytest.raises(EngineError, match="shutting down"):
            await second

    asyncio.run(scenario())


def test_an_idle_thread_sleeps():
    async def scenario(engine, core):
        await read(await engine.submit(make_request("a", max_tokens=2)))
        calls = 0
        has_work = core.has_work

        def counting():
            nonlocal calls
            calls += 1
            return has_work()

        core.has_work = counting
        await asyncio.sleep(0.2)
        return calls

    assert run(scenario) <= 2


@pytest.mark.parametrize("turns", range(12))
def test_a_reader_that_is_cancelled_while_news_come_ends(turns):
    """At whatever turn of the loop between the news and their delivery."""

    async def main():
        may_speak = asyncio.Event()

        async def stream():
            await may_speak.wait()
            yield Delta(token_ids=[1])
            await asyncio.Event().wait()  # it was closed: nothing comes any more

        async def reader():
            async for _ in interleave([stream()], keep_alive_seconds=60):
                pass

        task = asyncio.create_task(reader())
        await asyncio.sleep(0.01)
        may_speak.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=1)
        is_over = task in done and task.cancelled()
        task.cancel()
        return is_over

    assert asyncio.run(main())
