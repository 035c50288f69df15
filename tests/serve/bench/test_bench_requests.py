"""Data sets and arrival times of the load generator."""

import itertools
import json
import statistics

import pytest

from girih.kernels.base.errors import ConfigError
from girih.serve.bench.arrivals import arrival_times
from girih.serve.bench.config import DatasetConfig, EndpointConfig, LoadConfig, ReportConfig
from girih.serve.bench.datasets import BenchRequest, make_requests


def make(as_text=False, **options):
    return make_requests(DatasetConfig(**options), as_text)


def test_random_prompts_have_their_lengths_and_come_again_from_the_seed():
    first = make(num_requests=5, input_len=7, output_len=3, token_range=(10, 20))
    assert [len(request.prompt) for request in first] == [7] * 5
    assert {request.output_len for request in first} == {3}
    assert all(10 <= token < 20 for request in first for token in request.prompt)
    assert make(num_requests=5, input_len=7, output_len=3, token_range=(10, 20)) == first
    assert make(num_requests=5, input_len=7, output_len=3, token_range=(10, 20), seed=1) != first


def test_lengths_spread_evenly_around_the_middle():
    lengths = [len(r.prompt) for r in make(num_requests=400, input_len=100, length_spread=0.5)]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert 95 < statistics.fmean(lengths) < 105
    assert statistics.pstdev(lengths) > 20


def test_prefixes_are_shared_in_turn():
    requests = make(num_requests=6, input_len=4, prefix_len=10, num_prefixes=2)
    starts = [tuple(request.prompt[:10]) for request in requests]
    assert starts[0] == starts[2] == starts[4] != starts[1] == starts[3]
    assert len({tuple(request.prompt[10:]) for request in requests}) == 6


def test_text_prompts_are_words():
    (request,) = make(as_text=True, num_requests=1, input_len=9)
    assert len(request.prompt.split()) == 9
    assert request.prompt.isascii()


def test_sharegpt_takes_the_first_question_and_the_length_of_its_answer(tmp_path):
    file = tmp_path / "talk.json"
    talk = [
        {"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a" * 40}]},
        {"conversations": [{"from": "human", "value": "lonely"}]},
        {"other": 1},
        {"conversations": [{"from": "human", "value": "q2"}, {"from": "gpt", "value": "ab"}]},
    ]
    file.write_text(json.dumps(talk))
    options = {"kind": "sharegpt", "file": str(file), "output_len": None}
    requests = make(**options, num_requests=0)
    assert {(r.prompt, r.output_len) for r in requests} == {("q1", 10), ("q2", 1)}
    assert [r.index for r in requests] == [0, 1]
    assert len(make(**options, num_requests=1)) == 1
    assert make(**{**options, "output_len": 5})[0].output_len == 5


def test_trace_keeps_times_and_shares_blocks(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 6500, "input_length": 12, "output_length": 4, "hash_ids": [1, 9]},
        {"timestamp": 7000, "prompt": "hello"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    options = {"kind": "trace", "file": str(file), "output_len": None, "hash_block": 8}
    one, two, three = make(**options, num_requests=0)
    assert [one.at, two.at, three.at] == [0.0, 1.5, 2.0]
    assert [len(one.prompt), len(two.prompt), three.prompt] == [20, 12, "hello"]
    assert one.prompt[:8] == two.prompt[:8]
    assert one.prompt[8:12] != two.prompt[8:12]
    assert [one.output_len, two.output_len] == [3, 4]
    assert arrival_times([one, two, three], LoadConfig(speed=2.0)) == [0.0, 0.75, 1.0]


def test_what_a_trace_s_line_holds_does_not_split_it(tmp_path):
    file = tmp_path / "trace.jsonl"
    prompts = ["a\u2028b\x85c", "d"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert [request.prompt for request in make(kind="trace", file=str(file))] == prompts


def test_conversations_that_cannot_be_sent_are_left_out(tmp_path):
    file = tmp_path / "chats.json"
    turns = [{"value": "question"}, {"value": "answer"}]
    wrong = [
        3,
        {"conversations": 3},
        {"conversations": {}},
        {"conversations": [{"value": "\ud83d"}] * 2},
    ]
    file.write_text(json.dumps([{"conversations": turns}, *wrong]))
    options = {"kind": "sharegpt", "file": str(file), "num_requests": 0}
    assert [request.prompt for request in make(**options)] == ["question"]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "3", '{"timestamp": 1}', '{"input_length": "x"}', '["prompt"]', "[" * 100_000),
        *('{"prompt": "\\ud83d"}', '{"prompt": "a", "timestamp": NaN}'),
        *('{"input_length": 3, "output_length": "x"}', '{"input_length": 3, "hash_ids": 5}'),
    ],
)
def test_a_wrong_trace_line_is_named(tmp_path, line):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_length": 3}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        make(kind="trace", file=str(file))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        make(kind="sharegpt", file=str(tmp_path / "none"))
    (tmp_path / "a").write_text("[]")
    with pytest.raises(ConfigError, match="no usable"):
        make(kind="sharegpt", file=str(tmp_path / "a"))
    (tmp_path / "a").write_text("{}")
    with pytest.raises(ConfigError, match="list of conversations"):
        make(kind="sharegpt", file=str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (EndpointConfig, "api", "grpc"),
        (EndpointConfig, "base_url", "ftp://localhost:1"),
        (EndpointConfig, "extra_body", "[1]"),
        (EndpointConfig, "extra_body", "{"),
        (DatasetConfig, "kind", "poems"),
        (DatasetConfig, "num_requests", 0),
        (DatasetConfig, "length_spread", 1.0),
        (DatasetConfig, "token_range", (5, 5)),
        (DatasetConfig, "output_len", None),
        (LoadConfig, "request_rate", 0.0),
        (LoadConfig, "burstiness", -1.0),
        (LoadConfig, "ramp", "steep"),
        (LoadConfig, "max_concurrency", 0),
        (ReportConfig, "percentiles", (101.0,)),
    ],
)
def test_values_that_are_not_allowed(record, field, value):
    with pytest.raises(ConfigError, match=field):
        record(**{field: value})


def test_a_base_url_may_end_in_v1():
    assert EndpointConfig(base_url="http://h:1/v1/").root == "http://h:1"


def gaps(count=4000, **load):
    requests = [BenchRequest(index, "x", 1) for index in range(count)]
    times = arrival_times(requests, LoadConfig(**load))
    assert times == sorted(times)
    assert times[0] == 0.0
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_infinite_rate_sends_all_at_once():
    assert set(gaps(10)) == {0.0}


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness, spread):
    seen = gaps(request_rate=20.0, burstiness=burstiness)
    mean = statistics.fmean(seen)
    assert mean == pytest.approx(1 / 20, rel=0.1)
    # A gamma distribution of shape k has a relative deviation of 1 / sqrt(k).
    assert statistics.pstdev(seen) / mean == pytest.approx(spread, rel=0.15)


@pytest.mark.parametrize(("ramp", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_ramps_reach_their_rates(ramp, middle):
    seen = gaps(ramp=ramp, ramp_start=1.0, ramp_end=100.0, burstiness=400.0)
    assert statistics.fmean(seen[:40]) == pytest.approx(1.0, rel=0.5)
    assert statistics.fmean(seen[1980:2020]) == pytest.approx(1 / middle, rel=0.1)
    assert statistics.fmean(seen[-40:]) == pytest.approx(0.01, rel=0.1)
