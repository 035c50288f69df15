"""Requests, a router and replicas on one clock that jumps from event to event.

    due ─▶ (max_concurrency) ─▶ sent ─ front ─▶ router ─▶ Replica ─▶ step ends ─▶ tokens ─▶ Tally

Only unfinished requests and the time of the next event of each replica are kept.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from girih.kernels.base.errors import ConfigError, GirihError
from girih.runtime.records.config import CacheConfig, SchedulerConfig
from girih.runtime.records.request import EngineOutput
from girih.serve.bench.config import LoadConfig, SloConfig
from girih.serve.bench.datasets import BenchRequest
from girih.serve.bench.load import LoadState
from girih.serve.bench.records import RequestRecord
from girih.serve.twin.config import SimulateConfig
from girih.serve.twin.cost import StepCost
from girih.serve.twin.figures import Tally
from girih.serve.twin.replica import Replica
from girih.serve.twin.requests import DueRequest, engine_request

Observer = Callable[[LoadState], None]
Event = tuple[float, int, Callable[[float], None]]
ENDS_PER_NOTE = 200  # the observer is told after so many ended requests


@dataclass(frozen=True)
class TwinSettings:
    """Settings of the replicas.

    Attributes:
        simulate: how many, and how requests are routed.
        scheduler: limits of a step.
        cache: of each replica; what is not set is the measured engine's.
        cost: what steps cost.
    """

    simulate: SimulateConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    cost: StepCost

    def replicas(self) -> list[Replica]:
        """Make them.

        Raises:
            ConfigError: the cache is given in bytes, which mean nothing here.
        """
        if self.cache.kv_cache_bytes is not None:
            raise ConfigError(
                "cache.kv_cache_bytes means nothing to a simulation, which has no bytes: set "
                "cache.num_blocks, or leave the measured engine's"
            )
        engine, simulate = self.cost.engine, self.simulate
        cache = replace(self.cache, num_blocks=self.cache.num_blocks or self._measured_blocks())
        if simulate.max_model_len is not None:
            engine = msgspec.structs.replace(engine, max_model_len=simulate.max_model_len)
        return [
            Replica(self.scheduler, cache, engine, self.cost, simulate.async_scheduling)
            for _ in range(simulate.replicas)
        ]

    def _measured_blocks(self) -> int:
        """As many token slots as the measured engine had, in blocks of this size."""
        engine = self.cost.engine
        return (engine.num_blocks - 1) * engine.block_size // self.cache.block_size + 1


class Simulation:
    """One run.

    Args:
        settings: the replicas.
        load: how many requests may be under way.
        slo: limits of a good request.
        on_end: told about each request that ended.
        observer: told how far the run is.

    Attributes:
        replicas: the engines.
        tally: the figures.
        wall_seconds: how long the run took on a real clock.
    """

    def __init__(
        self,
        settings: TwinSettings,
        load: LoadConfig,
        slo: SloConfig,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
        observer: Observer = lambda state: None,
    ) -> None:
        self.replicas = settings.replicas()
        self.tally = Tally(slo)
        self.wall_seconds = 0.0
        self._front = settings.cost.front
        self._routing = settings.simulate.routing
        self._max_concurrency = load.max_concurrency
        self._on_end = on_end
        self._observer = observer
        self._events: list[Event] = []
        self._num_events = 0
        self._requests: Iterator[DueRequest] = iter(())
        self._held: deque[tuple[RequestRecord, BenchRequest]] = deque()
        self._records: dict[str, RequestRecord] = {}
        self._num_open = self._num_routed = 0
        self.peak_open = 0
        self.peak_kv_usage = 0.0
        self._total = 0

    def run(self, requests: Iterator[DueRequest], total: int) -> None:
        """Let every request come and end.

        Args:
            requests: with their sending times, which never fall.
            total: how many there are.
        """
        started = time.perf_counter()
        self._requests, self._total = requests, total
        self._await_next()
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)
        self.wall_seconds = time.perf_counter() - started

    def summary(self, percentiles: tuple[float, ...]) -> dict[str, Any]:
        """The figures of `girih bench serve`, and under "engines" what clients cannot see."""
        stats = [replica.core.stats() for replica in self.replicas]
        caches = [stat.kv_cache for stat in stats]
        num_steps = sum(stat.num_steps for stat in stats)
        looked_up = sum(cache.prefix_queries for cache in caches)
        busy = sum(replica.busy_seconds for replica in self.replicas)
        tokens = sum(replica.num_tokens for replica in self.replicas)
        seconds = max(self.tally.seconds, 1e-9)
        return {
            **self.tally.summary(percentiles),
            "peak_concurrency": self.peak_open,
            "engines": {
                "replicas": len(self.replicas),
                "steps": num_steps,
                "tokens_per_step": tokens / max(1, num_steps),
                "busy": busy / (seconds * len(self.replicas)),
                "preemptions": sum(stat.num_preemptions for stat in stats),
                "cache_hit_rate": sum(c.prefix_hits for c in caches) / max(1, looked_up),
                "evictions": sum(cache.num_evictions for cache in caches),
                "peak_kv_usage": self.peak_kv_usage,
            },
            "wall_seconds": self.wall_seconds,
        }

    # ---- events ----

    def _at(self, moment: float, act: Callable[[float], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (moment, self._num_events, act))

    def _await_next(self) -> None:
        following = next(self._requests, None)
        if following is not None:
            self._at(following[0], partial(self._due, request=following[1]))

    def _due(self, now: float, request: BenchRequest) -> None:
        self._await_next()
        record = RequestRecord(request.index, now)
        if self._max_concurrency is not None and self._num_open >= self._max_concurrency:
            self._held.append((record, request))
        else:
            self._send(now, record, request)

    def _send(self, now: float, record: RequestRecord, request: BenchRequest) -> None:
        record.sent = now
        self._num_open += 1
        self.peak_open = max(self.peak_open, self._num_open)
        self._at(now + self._front, partial(self._reach, record=record, request=request))

    def _reach(self, now: float, record: RequestRecord, request: BenchRequest) -> None:
        replica = self._route()
        asked = engine_request(request, now)
        record.num_prompt_tokens = len(asked.prompt_token_ids)
        try:
            replica.submit(asked)
        except GirihError as error:
            record.error = f"{type(error).__name__}: {error}"
            self._end(now, record)
            return
        self._records[asked.request_id] = record
        if replica.wake(now):
            self._await_step(replica)

    def _route(self) -> Replica:
        self._num_routed += 1
        if self._routing == "round_robin":
            return self.replicas[(self._num_routed - 1) % len(self.replicas)]
        return min(self.replicas, key=lambda replica: replica.num_unfinished)

    def _await_step(self, replica: Replica) -> None:
        if replica.step_ends is not None:
            self._at(replica.step_ends, partial(self._step_ends, replica=replica))

    def _step_ends(self, now: float, replica: Replica) -> None:
        usage = 1 - replica.free_share
        self.peak_kv_usage = max(self.peak_kv_usage, usage)
        for output in replica.finish_step(now):
            self._take(now, output)
        self._await_step(replica)

    def _take(self, now: float, output: EngineOutput) -> None:
        record = self._records[output.request_id]
        record.pieces.append(now)
        self.tally.token(now)
        if output.finish_reason is not None:
            del self._records[output.request_id]
            record.num_output_tokens = len(record.pieces)
            record.num_cached_tokens = output.num_cached_tokens
            record.counted_by = "server"
            record.finish_reason = output.finish_reason
            self._end(now, record)

    def _end(self, now: float, record: RequestRecord) -> None:
        record.ended = now
        self._num_open -= 1
        self.tally.end(record)
        self._on_end(record)
        if self._held:
            self._send(now, *self._held.popleft())
        num_ended = self.tally.completed + self.tally.failed
        if num_ended % ENDS_PER_NOTE == 0 or num_ended == self._total:
            self._observer(
                LoadState(
                    self._total,
                    self._num_open,
                    num_ended,
                    self.tally.failed,
                    self.tally.output_tokens,
                    now,
                )
            )
