"""/metrics, and log lines."""

import json
import logging
import re
import threading
from pathlib import Path

import pytest

from girih.runtime.engine.core import CompileState
from girih.runtime.observe.metrics import EngineMetrics
from girih.runtime.step.buckets import ReplayStats
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
    assert server.get("/metrics").status_code == server.get("/load").status_code == status
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


DASHBOARD = json.loads((Path(__file__).parents[4] / "serve" / "grafana.json").read_text())
REPLAYS = ReplayStats(
    steps={"full": {"4": 3}, "none": {"": 1}},
    tokens={"full": 9},
    padded_tokens={"full": 3},
    captures={"full": 1},
    misses={"full": {"mixed": 1}},
    buffer_bytes=64,
)


@pytest.fixture
def exported(observed):
    """Names of all metrics: those of a core that replays steps while it compiles."""
    server = observed()
    server.core.replay_stats = lambda: REPLAYS
    server.core.compile_state = lambda: CompileState("compiling", 1, 3, 0.5)
    server.core.observers[-1].set_facts({"start_trace_seconds": 1.0}, bundle="found")
    text = server.get("/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    return {name: kind for name, kind in kinds.items() if not name.endswith("_created")}


def queried(panel):
    """Metrics that a panel asks for; what Prometheus makes of a histogram is the histogram."""
    for target in panel["targets"]:
        for name in re.findall(r"(?:girih:|\bhttp_)\w+(?:\.\*\w+)?", target["expr"]):
            yield re.sub(r"_(bucket|sum|count)$", "", name)


def test_every_metric_of_the_dashboard_exists(exported):
    used = {name for panel in DASHBOARD["panels"] for name in queried(panel)}
    assert len(used) > 40
    assert [n for n in used if not any(re.fullmatch(n, name) for name in exported)] == []
    (model,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "model")
    assert re.search(r"girih:\w+", model["query"])[0] in exported


def test_every_metric_has_a_panel(exported):
    used = {name for panel in DASHBOARD["panels"] for name in queried(panel)}
    assert [name for name in exported if not any(re.fullmatch(n, name) for n in used)] == []


def test_counters_are_shown_as_rates_and_histograms_as_quantiles_or_means(exported):
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for name in queried({"targets": [target]}):
                kind = exported.get(name, "gauge")
                is_count = name == "girih:recompiles_after_ready_total"  # it must stay 0
                assert (kind == "gauge" or is_count) == ("rate(" not in target["expr"]), name
                is_split = f"{name}_" in target["expr"]
                assert (kind == "histogram") == is_split, name


def test_panels_lie_side_by_side_and_have_names():
    cells = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in DASHBOARD["panels"]]
    ids, titles = zip(*((p["id"], p["title"]) for p in DASHBOARD["panels"]), strict=True)
    for found in (cells, ids, titles):
        assert len(set(found)) == len(found)


def test_every_label_of_a_legend_is_kept_by_its_query():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            labels = {label.strip() for group in kept for label in group.split(",")} | {"__name__"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
