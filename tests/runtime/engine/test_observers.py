"""What watches a core: metrics, the step trace, the status line."""

import json
import logging
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support_core import make_request, run_to_end
from support_fake_runner import FakeRunner

from girih.kernels.base.errors import QueueFullError
from girih.runtime.client.control import call_method
from girih.runtime.client.loop import admit
from girih.runtime.observe.metrics import EngineMetrics, length_buckets
from girih.runtime.observe.status_line import StatusLine, status_text
from girih.runtime.observe.step_trace import StepTracer
from girih.runtime.step.buckets import Dispatcher, Mode, ReplayCounts


def read(text):
    """Samples of a metrics text: name -> sum over label sets."""
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def watched(request, new_core):
    core = new_core(async_scheduling=request.param, num_blocks=8, max_num_seqs=2, max_num_waiting=2)
    metrics = EngineMetrics(core, "fake", 256)
    core.observers.append(metrics)
    yield core, metrics
    core.close()


def test_counts_and_times_of_requests(watched):
    core, metrics = watched
    core.add_request(make_request("a", 40, max_tokens=8))
    core.add_request(make_request("b", 20, max_tokens=5))
    core.step()
    core.add_request(make_request("gone", 8, max_tokens=50))
    core.abort(["gone"])
    run_to_end(core)
    values = read(metrics.text())
    assert values["girih:prompt_tokens_total"] == 60
    assert values["girih:generation_tokens_total"] == 13
    assert values["girih:time_to_first_token_seconds_count"] == 2
    assert values["girih:inter_token_latency_seconds_count"] == 11
    assert values["girih:e2e_request_latency_seconds_count"] == 2
    assert values["girih:request_generation_tokens_sum"] == 13
    assert values["girih:request_success_total"] == 3  # the aborted one has its own reason
    assert values["girih:num_requests_running"] == 0
    assert values["girih:iteration_tokens_total_sum"] >= 60 + 11
    assert values["girih:step_time_seconds_total"] > 0
    assert 0 < values["girih:e2e_request_latency_seconds_sum"] < 60
    parts = ("queue", "prefill", "decode")
    split = sum(values[f"girih:request_{part}_time_seconds_sum"] for part in parts)
    assert split == pytest.approx(values["girih:e2e_request_latency_seconds_sum"], abs=0.05)
    assert len(metrics._clock) == 0


def test_finish_reasons_and_preemptions(new_core):
    core = new_core(num_blocks=6, enable_prefix_caching=False)
    metrics = EngineMetrics(core, "fake", 256)
    core.observers.append(metrics)
    for name in "ab":
        core.add_request(make_request(name, 20, max_tokens=40))
    run_to_end(core)
    preemptions = core.stats().num_preemptions
    assert preemptions > 0
    values = read(metrics.text())
    assert values["girih:num_preemptions_total"] == preemptions
    assert values["girih:request_num_preemptions_sum"] == preemptions
    assert 'finished_reason="length",model_name="fake"} 2.0' in metrics.text()


def test_a_failed_step_leaves_no_request_behind(new_core, caplog):
    caplog.set_level(logging.CRITICAL)
    core = new_core(runner=FakeRunner(16, fail_at={1: ValueError("x")}))
    metrics = EngineMetrics(core, "fake", 256)
    core.observers.append(metrics)
    core.add_request(make_request("a", max_tokens=9))
    run_to_end(core)
    assert len(metrics._clock) == 0
    assert 'finished_reason="error",model_name="fake"} 1.0' in metrics.text()


def test_front_ends_add_http_requests_and_refusals_are_counted(watched):
    core, _ = watched
    refused = [admit(core, make_request(f"r{i}")).refusal for i in range(3)]
    assert [r and r.kind for r in refused] == [None, None, "QueueFullError"]
    seen = [("POST", "/v1/completions", 200, 0.2), ("POST", "/v1/completions", 429, 0.1)]
    values = read(call_method(core, "metrics", {"http": seen}))
    assert values["http_requests_total"] == 2
    assert values["girih:admission_rejections_total"] == 1
    core.abort(list(core.scheduler.requests))
    assert not core.has_work()


def test_queued_tokens_are_limited(new_core):
    core = new_core(max_waiting_tokens=50)
    core.add_request(make_request("a", 80))  # an empty queue takes any prompt
    with pytest.raises(QueueFullError, match=r"80 prompt tokens wait .* is 50") as caught:
        core.add_request(make_request("b", 10))
    assert caught.value.reason == "max_waiting_tokens"
    core.step()
    core.add_request(make_request("b", 10))
    core.add_request(make_request("c", 40))
    with pytest.raises(QueueFullError):
        core.add_request(make_request("d", 1))
    run_to_end(core)


def test_a_paused_core_plans_nothing(watched):
    core, _ = watched
    core.add_request(make_request("a", max_tokens=5))
    core.step()
    call_method(core, "pause", {})
    while core.has_work():
        core.step()
    stats = call_method(core, "stats", {})
    assert stats.is_paused
    assert stats.num_running == 1
    steps = stats.num_steps
    core.step()
    assert core.stats().num_steps == steps
    call_method(core, "resume", {})
    assert len(run_to_end(core)["a"].tokens) >= 3


def test_length_buckets():
    assert length_buckets(256) == (1, 2, 5, 10, 20, 50, 100, 200)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_step_trace_is_a_chrome_trace(new_core, tmp_path, is_async):
    path = tmp_path / "trace.json"
    core = new_core(async_scheduling=is_async)
    core.observers.append(StepTracer(path, core.scheduler))
    for name in "ab":
        core.add_request(make_request(name, 20, max_tokens=4))
    run_to_end(core)
    num_steps = core.stats().num_steps
    core.close()
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans} == {"schedule", "run", "update"}
    assert len(spans) == 3 * num_steps
    assert all(event["dur"] >= 0 for event in spans)
    by_step = {}
    for event in spans:
        by_step.setdefault(event["args"]["step"], {})[event["name"]] = event
    for step in by_step.values():
        assert step["schedule"]["ts"] <= step["run"]["ts"] <= step["update"]["ts"]
    assert by_step[0]["schedule"]["args"]["new"] == ["a", "b"]


def test_the_status_line_tells_rates_and_is_silent_when_idle(new_core, caplog, monkeypatch):
    """A clock of its own: every step takes a quarter of a second."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class QuarterSteps(FakeRunner):
        def execute(self, plan):
            now[0] += 0.25
            return super().execute(plan)

    caplog.set_level(logging.INFO, "girih.engine")
    core = new_core(runner=QuarterSteps(16))
    core.observers.append(StatusLine(core, 1.0))
    core.add_request(make_request("a", 20, max_tokens=20))
    run_to_end(core)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 5  # 20 steps
    assert "running 1, waiting 0, prompt 20 tok/s, output 4 tok/s" in lines[0]
    assert "prompt 0 tok/s, output 4 tok/s" in lines[1] and "preemptions 0" in lines[1]
    now[0] += 100.0
    core.step()
    core.add_request(make_request("b", 20, max_tokens=3))  # too short for a line
    run_to_end(core)
    assert len(caplog.records) == 5


def test_the_status_line_tells_which_steps_were_captured(new_core):
    idle = new_core().stats()
    counts = ReplayCounts()
    dispatcher = Dispatcher(Mode.FULL, (8,), (4,))
    before = msgspec.structs.replace(idle, replay=counts.stats(0))
    for size in ((3, 3, 3), (4, 4, 4), (6, 2, 2), (9, 1, 1)):
        counts.note(dispatcher.choose(*size), size[0], False)
    now = msgspec.structs.replace(idle, replay=counts.stats(0))
    assert status_text(before, now, 1.0).endswith(", captured 75% (padding 19%)")  # 3 of 4 + 4 + 8
    assert "captured" not in status_text(now, now, 1.0)
    assert "captured" not in status_text(idle, idle, 1.0)
