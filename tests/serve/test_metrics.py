"""/metrics, and log lines."""

import json
import logging
import re
import threading
from pathlib import Path

import pytest

from girih.runtime.metrics import EngineMetrics
from girih.serve.config import MetricsConfig
from girih.serve.logs import JsonFormatter, TextFormatter, request_id


@pytest.fixture
def observed(new_server):
    """Factory of servers whose core keeps metrics."""

    def make(**options):
        server = new_server(**options)
        server.core.observers.append(EngineMetrics(server.core, "fake", 256))
        return server

    return make


def test_metrics_of_engine_and_http(observed):
    server = observed()
    server.post("/v1/completions", prompt="a", max_tokens=4, ignore_eos=True)
    server.post("/v1/completions", nonsense=True)
    server.get("/nowhere/at/all")
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    assert 'girih:generation_tokens_total{engine="0",model_name="fake"} 4.0' in text
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0' in text
    assert 'handler="none",method="GET",status="404"' in text
    assert "nowhere" not in text
    assert "girih:engine_up 1" in text


def test_the_prefix_can_be_that_of_other_dashboards(observed):
    text = observed(serve={"metrics": MetricsConfig(prefix="vllm:")}).get("/metrics").text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert "girih:" not in text


@pytest.mark.parametrize(("guard", "status"), [(False, 200), (True, 401)])
def test_metrics_ask_for_a_key_when_told_to(observed, guard, status):
    serve = {"api_keys": ("secret",), "metrics": MetricsConfig(guard=guard)}
    server = observed(serve=serve)
    assert server.get("/metrics").status_code == status
    headers = {"authorization": "Bearer secret"}
    assert server.get("/metrics", headers=headers).status_code == 200


def test_without_an_engine_metrics_say_so(new_server):
    hold = threading.Event()
    server = new_server(hold=hold)
    assert server.get("/metrics").text.splitlines()[-1] == "girih:engine_up 0"
    hold.set()


def make_record(**extra):
    record = logging.LogRecord("girih.x", logging.INFO, "f", 1, "100%% of %s", ("it",), None)
    record.__dict__.update(extra)
    return record


def test_log_lines_name_the_request():
    line = json.loads(JsonFormatter().format(make_record(request_id="r1")))
    assert (line["message"], line["level"], line["request_id"]) == ("100% of it", "info", "r1")
    token = request_id.set("50%d")
    try:
        assert "[50%d] 100% of it" in TextFormatter().format(make_record())
        assert json.loads(JsonFormatter().format(make_record()))["request_id"] == "50%d"
    finally:
        request_id.reset(token)
    assert "[" not in TextFormatter().format(make_record()).split("INFO")[1]
    assert "request_id" not in json.loads(JsonFormatter().format(make_record()))


def test_every_metric_of_the_dashboard_exists(observed):
    server = observed()
    server.post("/v1/completions", prompt="a", max_tokens=2)
    names = set(re.findall(r"^(?:girih:)?\w+", server.get("/metrics").text, re.MULTILINE))
    dashboard = (Path(__file__).parents[2] / "serve" / "grafana.json").read_text()
    used = set(re.findall(r"girih:\w+|\bhttp_\w+", dashboard))
    assert len(used) > 15
    assert {name for name in used if name not in names} == {"girih:admission_rejections_total"}
