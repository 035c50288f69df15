"""`girih bench serve` against the real server over a fake model."""

import json
import threading

import pytest

from girih.serve.bench import plots
from girih.serve.cli import main as cli

IDS = "dataset.token_range=[10,400]"


def run(capsys, server, *words):
    code = cli.main(["bench", "serve", "-q", f"base_url={server.url}", IDS, *words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_completions_are_counted_by_the_server(capsys, shared_server, tmp_path):
    code, out, _ = run(
        capsys,
        shared_server,
        "num_requests=6",
        "input_len=20",
        "output_len=5",
        "load.warmups=0",
        "slo.e2e_ms=60000",
        f"report.json={tmp_path / 'r.json'}",
        f"report.records={tmp_path / 'r.jsonl'}",
        "endpoint.api_key=secret",
    )
    assert code == 0
    assert "6 completed, 0 failed" in out
    assert "time to first token" in out
    summary = json.loads((tmp_path / "r.json").read_text())
    assert (summary["input_tokens"], summary["output_tokens"]) == (120, 30)
    assert (summary["output_counted_by"], summary["slo_kept"]) == ("server", 6)
    assert summary["settings"]["load"]["request_rate"] == "inf"
    assert "secret" not in (tmp_path / "r.json").read_text()
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(6))
    assert all(line["finish_reason"] == "length" for line in lines)
    assert all(0 <= line["ttft_ms"] <= line["e2e_ms"] for line in lines)


def test_chat_sends_words_and_prefixes_are_cached(capsys, shared_server):
    code, out, _ = run(capsys, shared_server, "api=chat", "num_requests=2", "input_len=8")
    assert code == 0
    assert "2 completed" in out
    code, out, _ = run(
        capsys,
        shared_server,
        "dataset=prefix",
        "dataset.prefix_len=64",
        "dataset.num_prefixes=1",
        "num_requests=3",
        "max_concurrency=1",
    )
    assert code == 0
    assert "(0 from the server's cache)" not in out


def test_at_most_so_many_at_a_time(capsys, new_server):
    server = new_server(step_seconds=0.005)
    _, out, _ = run(capsys, server, "num_requests=9", "max_concurrency=2", "output_len=4")
    assert "at most 2" in out
    _, out, _ = run(capsys, server, "num_requests=9", "output_len=4")
    assert "at most 9" in out


def test_failures_are_counted_and_none_done_is_exit_code_1(capsys, shared_server):
    code, out, err = run(capsys, shared_server, "num_requests=2", "input_len=9999")
    assert code == 1
    assert "warm-up request failed: 400" in err
    code, out, _ = run(capsys, shared_server, "num_requests=2", "input_len=9999", "load.warmups=0")
    assert code == 1
    assert "0 completed, 2 failed" in out
    assert "error ×2: 400: the prompt has 9999 tokens" in out


def test_a_server_that_is_not_there(capsys):
    words = ["bench", "serve", "base_url=http://127.0.0.1:9", "endpoint.wait_seconds=0", "-q"]
    assert cli.main(words) == 1
    assert "girih serve" in capsys.readouterr().err


def test_a_loading_server_is_waited_for(capsys, new_server):
    hold = threading.Event()
    server = new_server(hold=hold)
    timer = threading.Timer(0.6, hold.set)
    timer.start()
    assert run(capsys, server, "num_requests=1", "input_len=4", "output_len=2")[0] == 0
    timer.join()


def test_a_guarded_server_needs_the_key(capsys, new_server):
    server = new_server(serve={"api_keys": ("k",)})
    assert "refuses the key" in run(capsys, server, "num_requests=1")[2]
    code, _, _ = run(capsys, server, "num_requests=1", "input_len=4", "endpoint.api_key=k")
    assert code == 0


def test_plots_are_pictures(capsys, shared_server, tmp_path):
    code, out, _ = run(
        capsys,
        shared_server,
        "num_requests=4",
        "input_len=9",
        "output_len=6",
        "slo.ttft_ms=50",
        f"report.plots={tmp_path / 'plots'}",
    )
    assert code == 0
    names = ["latency.png", "requests.png", "throughput.png"]
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == names
    for name in names:
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / "plots" / name) in out


def test_plots_without_matplotlib_are_refused_before_the_work(capsys, monkeypatch, shared_server):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(capsys, shared_server, "report.plots=x", "num_requests=1")
    assert (code, out) == (2, "")
    assert "girih[plot]" in err


def test_an_interrupt_reports_what_was_done(new_server):
    import asyncio

    from girih.serve.bench.config import DatasetConfig, EndpointConfig, LoadConfig
    from girih.serve.bench.datasets import make_requests
    from girih.serve.bench.load import run_load

    server = new_server(step_seconds=0.005)
    requests = make_requests(
        DatasetConfig(num_requests=4, input_len=4, output_len=3, token_range=(10, 400)), False
    )

    async def interrupted():
        states = []
        task = asyncio.create_task(
            run_load(
                EndpointConfig(base_url=server.url),
                requests,
                LoadConfig(request_rate=0.5, burstiness=1000.0, warmups=0),
                0,
                lambda state: states.append(state.done),
            )
        )
        while 1 not in states:
            await asyncio.sleep(0.01)
        task.cancel()
        return await task

    measurement = asyncio.run(interrupted())
    assert measurement.interrupted
    assert len(measurement.records) == 1


@pytest.mark.parametrize("count", [0, 1, 3])
def test_plots_of_few_records(tmp_path, count):
    from girih.serve.bench.config import SloConfig
    from girih.serve.bench.records import RequestRecord

    records = [
        RequestRecord(i, 0.0, 0.1, 1.0, [0.5, 0.9], 3, 0, 2, "server", error="x" if i else None)
        for i in range(count)
    ]
    assert len(plots.write_plots(str(tmp_path), records, SloConfig(), "title")) == 3
