"""Latencies and figures against values worked out by hand."""

import pytest

from girih.serve.bench.client import note_event
from girih.serve.bench.config import SloConfig
from girih.serve.bench.load import Measurement
from girih.serve.bench.metrics import (
    concurrency_steps,
    describe,
    keeps,
    output_per_second,
    percentile,
    summarize,
)
from girih.serve.bench.records import RequestRecord
from girih.serve.bench.report import as_table


def record(index=0, **options):
    values = {
        "due": 0.0,
        "sent": 1.0,
        "ended": 2.0,
        "pieces": [1.2, 1.4, 1.9],
        "num_prompt_tokens": 10,
        "num_output_tokens": 5,
        "counted_by": "server",
    }
    return RequestRecord(index, **{**values, **options})


def test_latencies_of_a_record():
    seen = record()
    assert seen.ttft == pytest.approx(0.2)
    assert seen.e2e == pytest.approx(1.0)
    assert seen.tpot == pytest.approx(0.7 / 4)
    assert seen.itl == pytest.approx([0.2, 0.5])
    line = seen.as_line()
    assert line["ttft_ms"] == 200.0
    assert line["itl_ms"] == [200.0, 500.0]
    assert "pieces" not in line


def test_a_record_without_tokens_has_no_latency():
    empty = record(pieces=[], num_output_tokens=0)
    assert (empty.ttft, empty.tpot, empty.itl) == (None, None, [])
    assert record(pieces=[1.2], num_output_tokens=1).tpot is None


def test_percentiles_are_linear_between_neighbours():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    figures = describe([3.0, 1.0, 2.0], [25.0, 99.9])
    assert figures["mean"] == figures["median"] == 2.0
    assert figures["p25"] == 1.5
    assert "p99.9" in figures
    assert describe([], [50.0]) is None


def test_summary_counts_and_rates():
    records = [
        record(0),
        record(1, sent=0.5, ended=3.0),
        record(2, error="500: no", pieces=[], num_output_tokens=0),
    ]
    measurement = Measurement("m", records, 4.0, False)
    summary = summarize(measurement, SloConfig(e2e_ms=1500), [50.0])
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert summary["output_throughput"] == pytest.approx(10 / 4)
    assert summary["total_throughput"] == pytest.approx(30 / 4)
    assert summary["request_throughput"] == pytest.approx(0.5)
    assert (summary["slo_kept"], summary["goodput"]) == (1, 0.25)
    assert summary["peak_concurrency"] == 3
    assert summary["errors"] == {"500: no": 1}
    table = as_table(summary)
    assert "2 completed, 1 failed" in table
    assert "error ×1: 500: no" in table
    assert "e2e ≤ 1500 ms" in table


def test_a_summary_of_nothing_has_no_latency():
    summary = summarize(Measurement("m", [], 1.0, True), SloConfig(), [50.0])
    assert summary["completed"] == 0
    assert "goodput" not in summary
    assert "interrupted" in as_table(summary)


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        ({"ttft_ms": 199}, False),
        ({"ttft_ms": 201}, True),
        ({"tpot_ms": 170}, False),
        ({"itl_ms": 499}, False),
        ({"itl_ms": 501, "e2e_ms": 1001}, True),
        ({"itl_ms": 501, "e2e_ms": 999}, False),
    ],
)
def test_all_limits_must_be_kept(limit, kept):
    assert keeps(record(), SloConfig(**limit)) is kept
    assert not keeps(record(error="x"), SloConfig(**limit))


def test_time_lines():
    assert output_per_second([record(num_output_tokens=6, pieces=[0.1, 0.2, 2.5])]) == [4, 0, 2]
    steps = concurrency_steps([record(sent=1.0, ended=3.0), record(sent=2.0, ended=4.0)])
    assert steps == [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)]


def test_events_of_both_routes():
    chat = RequestRecord(0, 0.0)
    for now, event in enumerate(
        [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"reasoning_content": "hm"}}]},
            {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 4,
                    "completion_tokens": 9,
                    "prompt_tokens_details": {"cached_tokens": 2},
                },
            },
        ]
    ):
        note_event(event, chat, float(now))
    assert chat.pieces == [1.0, 2.0]
    assert (chat.finish_reason, chat.num_output_tokens, chat.counted_by) == ("length", 9, "server")
    assert (chat.num_prompt_tokens, chat.num_cached_tokens) == (4, 2)
    text = RequestRecord(0, 0.0)
    note_event({"choices": [{"text": "", "finish_reason": None}]}, text, 1.0)
    note_event({"choices": [{"text": "", "finish_reason": "stop"}], "usage": None}, text, 2.0)
    assert text.pieces == [1.0]
    note_event({"error": {"message": "broken"}}, text, 3.0)
    assert text.error == "broken"
