"""Sends all requests at their times, at most so many at once, and collects the records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from girih.kernels.base.errors import EngineError
from girih.serve.bench.arrivals import arrival_times
from girih.serve.bench.client import EndpointClient
from girih.serve.bench.config import EndpointConfig, LoadConfig
from girih.serve.bench.datasets import BenchRequest
from girih.serve.bench.records import RequestRecord

Observer = Callable[["LoadState"], None]


@dataclass
class LoadState:
    """Progress of a measurement.

    Attributes:
        total: requests in all.
        running: sent and not ended.
        done: ended, the failed ones included.
        failed: ended with an error.
        output_tokens: of those that ended.
        seconds: since the start.
    """

    total: int
    running: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    seconds: float = 0.0


@dataclass
class Measurement:
    """The records of a load run.

    Attributes:
        model: name of the model asked.
        records: of every request that ended, in the order of the data set.
        seconds: from the start to the last end.
        interrupted: whether it was stopped before all requests ended.
    """

    model: str
    records: list[RequestRecord]
    seconds: float
    interrupted: bool


async def run_load(
    endpoint: EndpointConfig,
    requests: Sequence[BenchRequest],
    load: LoadConfig,
    seed: int,
    observer: Observer = lambda state: None,
) -> Measurement:
    """Measure; when cancelled (Ctrl-C) what ended so far is returned.

    Raises:
        EngineError: the server cannot be reached, or fails on the warm-up.
    """
    async with AsyncExitStack() as stack:
        run = _Run(requests, load, observer)
        client = await stack.enter_async_context(EndpointClient(endpoint, run.clock))
        await client.connect()
        await _warm_up(client, requests[: load.warmups])
        await run.send_all(client, arrival_times(requests, load, seed))
        return Measurement(str(client.model), run.ended, run.clock(), run.interrupted)


async def _warm_up(client: EndpointClient, requests: Sequence[BenchRequest]) -> None:
    for request in requests:
        record = RequestRecord(request.index, 0.0)
        await client.send(request, record)
        if record.error is not None:
            raise EngineError(f"the warm-up request failed: {record.error}")


class _Run:
    def __init__(
        self, requests: Sequence[BenchRequest], load: LoadConfig, observer: Observer
    ) -> None:
        self._requests = requests
        self._observer = observer
        self._slots = asyncio.Semaphore(load.max_concurrency or len(requests))
        self._state = LoadState(len(requests))
        self._started = time.perf_counter()
        self._records: list[RequestRecord] = []
        self.interrupted = False

    @property
    def ended(self) -> list[RequestRecord]:
        """Records of requests that ended, in the order of the data set."""
        return sorted(self._records, key=lambda record: record.index)

    def clock(self) -> float:
        """Seconds since sending began."""
        return time.perf_counter() - self._started

    async def send_all(self, client: EndpointClient, times: Sequence[float]) -> None:
        self._started = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            for request, due in sorted(
                zip(self._requests, times, strict=True), key=lambda pair: pair[1]
            ):
                await asyncio.sleep(max(0.0, due - self.clock()))
                tasks.append(asyncio.create_task(self._send(client, request, due)))
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, client: EndpointClient, request: BenchRequest, due: float) -> None:
        record = RequestRecord(request.index, due)
        async with self._slots:
            self._state.running += 1
            self._tell()
            try:
                await client.send(request, record)
            finally:
                self._state.running -= 1
        self._records.append(record)
        self._state.done += 1
        self._state.failed += record.error is not None
        self._state.output_tokens += record.num_output_tokens
        self._tell()

    def _tell(self) -> None:
        self._state.seconds = self.clock()
        self._observer(self._state)
