"""Prometheus metrics of a core. Names follow vLLM's, with the prefix `girih:`.

    EngineCore ─▶ EngineMetrics (observer) ─▶ registry ─▶ text()
                                              ▲ gauges and counters read from EngineStats when asked

Front ends hand the text on and may replace the prefix; what only they know (HTTP requests) they
send here, so that several of them show the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from girih.runtime.engine.core import CompileState, EngineCore, EngineStats
from girih.runtime.engine.observers import CoreObserver, RequestClock, RequestTimes, StepReport
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.step.buckets import ReplayStats

PREFIX = "girih:"
LABELS = ("model_name", "engine")
PARTS = ("schedule", "prepare", "run", "sample", "update")

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
PER_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = tuple(float(n) for n in (1, 8, 16, *(32 << i for i in range(10))))
COUNTS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
HTTP_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


def length_buckets(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … up to `largest` tokens."""
    series = (factor * 10**power for power in range(9) for factor in (1, 2, 5))
    return tuple(float(value) for value in series if value <= largest)


class EngineMetrics(CoreObserver):
    """Watches a core.

    Args:
        core: the engine core.
        model_name: label of every metric.
        max_model_len: largest length that occurs, in tokens.
    """

    def __init__(self, core: EngineCore, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._clock = RequestClock()
        self._watch_times()
        self._watch_lengths(length_buckets(max_model_len))
        self._watch_steps()
        self._watch_http()
        self.registry.register(_StatsCollector(core.stats, self._labels))

    def text(self) -> str:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()

    def set_facts(self, facts: dict[str, float], **labels: str) -> None:
        """Set gauges of things that do not change any more (how the start went).

        Args:
            facts: value by name (without the prefix).
            labels: labels of an information metric `engine_info`, whose value is 1.
        """
        for name, value in facts.items():
            gauge = Gauge(f"{PREFIX}{name}", name, LABELS, registry=self.registry)
            gauge.labels(**self._labels).set(value)
        names = tuple(labels)
        info = Gauge(
            f"{PREFIX}engine_info", "How the engine was made.", (*LABELS, *names),
            registry=self.registry,
        )  # fmt: skip
        info.labels(**self._labels, **labels).set(1)

    def note_http(self, seen: list[tuple[str, str, int, float]]) -> None:
        """Count HTTP requests: (method, route, status, seconds) each."""
        for method, route, status, seconds in seen:
            self._http_requests.labels(method, route, str(status)).inc()
            self._http_seconds.labels(method, route).observe(seconds)

    def note_refusal(self, reason: str) -> None:
        """Count a request that a full queue refused."""
        self._refused.labels(self._labels["model_name"], reason).inc()

    # ---- CoreObserver ----

    def on_request(self, request: EngineRequest) -> None:
        """A request was taken in."""
        self._clock.arrive(request)

    def on_step(self, report: StepReport) -> None:
        """A step was digested."""
        self._clock.schedule(report.plan, report.scheduled)
        self._step_tokens.observe(report.plan.total_tokens)
        for name, part, seconds in zip(PARTS, self._parts, step_parts(report), strict=True):
            part.inc(seconds)
            self.step_seconds[name] += seconds
        for output in report.outputs:
            self._note(output, report.updated)

    def on_end(self, outputs: list[EngineOutput]) -> None:
        """Requests ended between steps."""
        for output in outputs:
            self._clock.take_token(output, 0.0)

    def _note(self, output: EngineOutput, now: float) -> None:
        known = self._clock.take_token(output, now)
        if known is None:
            return
        times, before = known
        if output.new_token_ids:
            if before:
                self._itl.observe((now - before) / len(output.new_token_ids))
            else:
                self._ttft.observe(now - times.arrived)
                self._cached.inc(times.num_cached_tokens)
        elif output.has_result:
            self._cached.inc(times.num_cached_tokens)
        if times.finish_reason in ("stop", "length"):
            self._note_finished(times)

    def _note_finished(self, times: RequestTimes) -> None:
        self._e2e.observe(times.ended - times.arrived)
        self._queue.observe(times.scheduled - times.arrived)
        self._prefill.observe(times.first_token - times.scheduled)
        self._inference.observe(times.last_token - times.scheduled)
        if times.num_tokens > 1:
            self._tpot.observe((times.last_token - times.first_token) / (times.num_tokens - 1))
        self._prompt_length.observe(len(times.request.prompt_token_ids))
        self._preemptions.observe(times.num_preemptions)
        if times.request.pooling is not None:  # no output tokens
            return
        self._decode.observe(times.last_token - times.first_token)
        self._output_length.observe(times.num_tokens)
        if times.request.sampling.max_tokens is not None:
            self._max_tokens.observe(times.request.sampling.max_tokens)

    def _watch_times(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Token to token.", PER_TOKEN)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.",
            PER_TOKEN,
        )  # fmt: skip
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to end.", PER_REQUEST)
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to first step.", PER_REQUEST
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", PER_REQUEST
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First to last token.", PER_REQUEST
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "First step to last token.", PER_REQUEST
        )

    def _watch_lengths(self, lengths: tuple[float, ...]) -> None:
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt length of finished requests.", lengths
        )
        self._output_length = self._histogram(
            "request_generation_tokens", "Output length of finished requests.", lengths
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "max_tokens of finished requests.", lengths
        )
        self._preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of finished requests.", COUNTS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens per step.", STEP_TOKENS
        )

    def _watch_steps(self) -> None:
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        step_parts = Counter(
            f"{PREFIX}step_time_seconds", "Time spent in steps, by part.", (*LABELS, "part"),
            registry=self.registry,
        )  # fmt: skip
        self._parts = [step_parts.labels(**self._labels, part=part) for part in PARTS]
        self.step_seconds = dict.fromkeys(PARTS, 0.0)

    def _watch_http(self) -> None:
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ("method", "handler", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Until the response was sent.", ("method", "handler"),
            buckets=HTTP_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._refused = Counter(
            f"{PREFIX}admission_rejections", "Requests refused because queues are full.",
            ("model_name", "reason"), registry=self.registry,
        )  # fmt: skip

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"{PREFIX}{name}", text, LABELS, buckets=buckets, registry=self.registry)
        child: Histogram = made.labels(**self._labels)
        return child

    def _counter(self, name: str, text: str) -> Counter:
        child: Counter = Counter(f"{PREFIX}{name}", text, LABELS, registry=self.registry).labels(
            **self._labels
        )
        return child


def step_parts(report: StepReport) -> tuple[float, float, float, float, float]:
    """Seconds of a step by `PARTS`; a runner without its own account spent all in "run"."""
    schedule = report.submitted - report.scheduled
    update = report.updated - report.received
    if report.times is None:
        return schedule, 0.0, report.ended - report.started, 0.0, update
    return schedule, report.times.prepare, report.times.run, report.times.sample, update


class _StatsCollector(Collector):
    """Turns `EngineStats` into metrics when they are asked for."""

    def __init__(self, stats: Callable[[], EngineStats], labels: dict[str, str]) -> None:
        self._stats = stats
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def collect(self) -> Iterator[Any]:
        """Yield the metrics."""
        stats = self._stats()
        cache = stats.kv_cache
        for name, text, value in (
            ("num_requests_running", "Requests that hold KV blocks.", stats.num_running),
            ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", cache.usage),
            ("kv_cache_blocks", "KV blocks in all.", cache.num_blocks),
            ("sleep_level", "0 awake; 1, 2 asleep.", stats.operation.sleep_level),
            *_compile_gauges(stats.compiling),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{name}", text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of admitted requests.", stats.num_prompt_tokens),
            ("generation_tokens", "Output tokens.", stats.num_generated_tokens),
            ("num_preemptions", "Requests that lost their blocks.", stats.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", cache.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found.", cache.prefix_hits),
            ("kv_cache_evictions", "Cached blocks given up.", cache.num_evictions),
            ("steps", "Steps that ran.", stats.num_steps),
            ("failed_steps", "Steps whose runner raised.", stats.num_failed_steps),
            ("recompiles_after_ready", "Tiles compiled while serving.", stats.recompiles),
        ):
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter
        finished = CounterMetricFamily(
            f"{PREFIX}request_success", "Requests that ended.",
            labels=(*self._names, "finished_reason"),
        )  # fmt: skip
        for reason in sorted({"stop", "length", "abort", "error"} | set(stats.finished)):
            finished.add_metric((*self._values, reason), stats.finished.get(reason, 0))
        yield finished
        if stats.replay is not None:
            yield from self._replays(stats.replay)

    def _replays(self, stats: ReplayStats) -> Iterator[Any]:
        """Counters of captured steps."""
        for name, text, extra, rows in (
            ("replay_steps", "Steps by mode and bucket.", ("mode", "bucket"), _pairs(stats.steps)),
            ("replay_misses", "Steps that a better mode could not take.", ("mode", "reason"),
             _pairs(stats.misses)),
            ("replay_captures", "Steps captured while they ran.", ("mode",),
             _singles(stats.captures)),
            ("replay_tokens", "Tokens in steps.", ("mode",), _singles(stats.tokens)),
            ("replay_padded_tokens", "Rows of padding in steps.", ("mode",),
             _singles(stats.padded_tokens)),
        ):  # fmt: skip
            counter = CounterMetricFamily(f"{PREFIX}{name}", text, labels=(*self._names, *extra))
            for labels, value in rows:
                counter.add_metric((*self._values, *labels), value)
            yield counter
        buffers = GaugeMetricFamily(
            f"{PREFIX}replay_buffer_bytes", "Address space of captured steps.", labels=self._names
        )
        buffers.add_metric(self._values, stats.buffer_bytes)
        yield buffers


def _pairs(counts: dict[str, dict[str, int]]) -> list[tuple[tuple[str, ...], int]]:
    return [((a, b), n) for a, inner in counts.items() for b, n in inner.items()]


def _singles(counts: dict[str, int]) -> list[tuple[tuple[str, ...], int]]:
    return [((name,), n) for name, n in counts.items()]


def _compile_gauges(state: CompileState | None) -> Iterator[tuple[str, str, float]]:
    """Gauges of a build behind the serving engine: name, text, value."""
    if state is not None:
        yield "compile_tiles", "Compiled tiles that the engine runs.", state.tiles
        yield "compile_tiles_wanted", "Distinct tiles of the model.", state.total_tiles
        yield "compile_seconds", "How long the build took, so far or in all.", state.seconds
        failed = state.phase == "failed"
        yield "compile_failed", "1 when eager pieces answer because compiling failed.", failed
