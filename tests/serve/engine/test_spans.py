"""OpenTelemetry spans of requests: through the SDK, and to a real receiver over HTTP."""

import importlib.util
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import httpx
import pytest

import girih.serve.engine.spans as spans
from girih.kernels.base.errors import ConfigError
from girih.serve.config import ServeConfig

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
BODY = {"prompt": "one two", "max_tokens": 4, "ignore_eos": True, "temperature": 0.5}


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"opentelemetry\.sdk is not installed.*girih\[otel\]"):
        spans.require_packages()


def test_an_endpoint_is_a_url():
    with pytest.raises(ConfigError, match=r"otlp_endpoint is 'localhost:4318'; it is a URL"):
        ServeConfig(otlp_endpoint="localhost:4318")


@pytest.fixture
def exporter():
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def traced(new_server, exporter):
    """Factory of servers whose spans end in `exporter`."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    def make(**options):
        server = new_server(**options)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        server.core.observers.append(spans.RequestSpans(provider, "fake"))
        return server

    return make


def by_name(exporter):
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_phases(traced, exporter):
    server = traced(step_seconds=0.02)
    before = time.time_ns()
    server.post("/v1/completions", **BODY)
    answer = httpx.post(f"{server.url}/v1/completions", headers=HEADERS, json=BODY)
    after = time.time_ns()
    assert answer.status_code == 200
    server.wait_for(lambda: len(exporter.get_finished_spans()) == 8)
    mine = [s for s in exporter.get_finished_spans() if s.context.trace_id == int(TRACE, 16)]
    parts = {span.name: span for span in mine}
    root = parts.pop("text_completion fake")
    assert root.parent.span_id == int(PARENT, 16)
    assert parts.keys() == {"queue", "prefill", "decode"}
    assert {part.parent.span_id for part in parts.values()} == {root.context.span_id}
    edges = [root.start_time, parts["queue"].start_time, parts["queue"].end_time]
    edges += [parts["prefill"].start_time, parts["prefill"].end_time]
    edges += [parts["decode"].start_time, parts["decode"].end_time, root.end_time]
    assert edges == sorted(edges)
    assert before - 1e6 <= edges[0] < edges[-1] <= after + 1e6
    assert parts["decode"].end_time - parts["decode"].start_time >= 3 * 0.02 * 1e9
    usage = server.post("/v1/completions", **BODY).json()["usage"]
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
    }
    assert {name: root.attributes[name] for name in wanted} == wanted
    assert root.attributes["gen_ai.response.id"].startswith("mine-0-0-")
    assert "one" not in str(root.attributes)  # no text of the user


def test_a_request_without_a_parent_begins_a_trace(traced, exporter):
    traced().post("/v1/completions", **BODY)
    root = by_name(exporter)["text_completion fake"]
    assert root.parent is None


def test_a_bad_parent_is_ignored(traced, exporter):
    server = traced()
    headers = {"traceparent": "00-nonsense"}
    assert httpx.post(f"{server.url}/v1/completions", headers=headers, json=BODY).is_success
    assert by_name(exporter)["text_completion fake"].parent is None


def test_a_failed_request_is_an_error(traced, exporter):
    server = traced(fail_at={1: ValueError("broken")})
    assert server.post("/v1/completions", **BODY).status_code == 500
    root = by_name(exporter)["text_completion fake"]
    assert not root.status.is_ok
    assert "broken" in root.status.description
    assert root.attributes["error.type"] == "engine_error"


class Receiver(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP."""

    got: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((self.path, self.headers["content-type"], body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        """Quiet."""


def test_spans_reach_a_receiver(new_server):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no extra otel")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
    )

    receiver = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    server = new_server()
    sent = spans.make_spans(f"http://127.0.0.1:{receiver.server_port}", "fake")
    server.core.observers.append(sent)
    server.post("/v1/completions", **BODY)
    server.wait_idle()
    sent.close()
    receiver.shutdown()
    receiver.server_close()
    [(path, kind, body)] = Receiver.got
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {s.name for scope in resource.scope_spans for s in scope.spans}
    assert names == {"text_completion fake", "queue", "prefill", "decode"}
    service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
    assert service == "girih"
