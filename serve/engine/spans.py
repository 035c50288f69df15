"""OpenTelemetry spans of requests, made where the times are known: beside the core.

    TRACEPARENT (HTTP header) ─▶ EngineRequest.trace ─▶ RequestSpans (observer)
    one span per request, with the children queue, prefill and decode ─▶ OTLP over HTTP

Attributes have the names of OpenTelemetry's conventions for generative AI. Needs the packages of
the extra `otel`; nothing of them is imported without `serve.otlp_endpoint`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from girih.kernels.base.errors import ConfigError
from girih.runtime.engine.observers import CoreObserver, RequestClock, RequestTimes, StepReport
from girih.runtime.records.request import EngineOutput, EngineRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SERVICE = "girih"


def require_packages() -> None:
    """Raise `ConfigError` when spans cannot be made here."""
    for name in PACKAGES:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it is missing
            found = False
        if not found:
            raise ConfigError(
                f"serve.otlp_endpoint is set, but the package {name} is not installed: "
                "pip install 'girih[otel]', or leave the setting out"
            )


def make_spans(endpoint: str, model_name: str) -> RequestSpans:
    """Spans that are sent to an OTLP receiver.

    Args:
        endpoint: its URL; without a path, /v1/traces is asked.
        model_name: an attribute of every span.

    Raises:
        ConfigError: the packages are missing.
    """
    require_packages()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    has_path = "/" in endpoint.partition("://")[2].rstrip("/")
    url = endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces"
    # girih closes the provider itself, with the core.
    provider = TracerProvider(
        resource=Resource.create({"service.name": SERVICE}), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return RequestSpans(provider, model_name)


class RequestSpans(CoreObserver):
    """Watches a core and ends a span when a request does.

    Args:
        provider: makes and exports spans; shut down when the core ends.
        model_name: an attribute of every span.
    """

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(SERVICE)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model_name
        self._clock = RequestClock()

    def on_request(self, request: EngineRequest) -> None:
        """A request was taken in."""
        self._clock.arrive(request)

    def on_step(self, report: StepReport) -> None:
        """A step was digested."""
        self._clock.schedule(report.plan, report.scheduled)
        self._note(report.outputs, report.updated)

    def on_end(self, outputs: list[EngineOutput]) -> None:
        """Requests ended between steps."""
        self._note(outputs, time.monotonic())

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _note(self, outputs: Iterable[EngineOutput], now: float) -> None:
        for output in outputs:
            known = self._clock.take_token(output, now)
            if known is not None and output.finish_reason is not None:
                self._write(known[0], output.error)

    def _write(self, times: RequestTimes, error: str | None) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        request, offset = times.request, time.time_ns() - time.monotonic_ns()

        def at(moment: float) -> int:
            return int(moment * 1e9) + offset

        operation = "embeddings" if request.pooling is not None else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(request.trace),
            kind=SpanKind.SERVER,
            attributes={"gen_ai.operation.name": operation, **self._attributes(times)},
            start_time=at(times.arrived),
        )
        inside = set_span_in_context(span)
        for name, start, end in _phases(times):
            part = self._tracer.start_span(name, context=inside, start_time=at(start))
            part.end(at(end))
        if times.finish_reason == "error":
            span.set_attribute("error.type", "engine_error")
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(at(times.ended))

    def _attributes(self, times: RequestTimes) -> dict[str, Any]:
        request, sampling = times.request, times.request.sampling
        attributes: dict[str, Any] = {
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": request.request_id,
            "gen_ai.response.finish_reasons": (times.finish_reason or "",),
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
            "gen_ai.usage.output_tokens": times.num_tokens,
            "girih.cached_tokens": times.num_cached_tokens,
            "girih.preemptions": times.num_preemptions,
        }
        if times.first_token:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
        if request.pooling is None:
            attributes |= {
                "gen_ai.request.temperature": float(sampling.temperature),
                "gen_ai.request.top_p": float(sampling.top_p),
            }
            if sampling.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        return attributes


def _phases(times: RequestTimes) -> Iterable[tuple[str, float, float]]:
    """Parts of a request's life that it reached: name, start, end."""
    if not times.scheduled:
        yield "queue", times.arrived, times.ended
        return
    yield "queue", times.arrived, times.scheduled
    yield "prefill", times.scheduled, times.first_token or times.ended
    if times.first_token:
        yield "decode", times.first_token, times.ended
