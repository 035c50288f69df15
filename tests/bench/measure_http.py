"""What the server costs over the engine: python tests/bench/measure_http.py [key=value ...].

    throughput   32 answers of 96 tokens to prompts of 32: `LLM.generate` in this process, then
                 the same through HTTP from a client in a process of its own, in turns
    idle         one prompt of 16 tokens at a time: the first token at the client, against the time
                 of a prefill step as the engine's own trace has it
    gap          how long the runner stands still between two steps at 32 running requests, with
                 and without planning ahead (from the same traces)

The throughput of a side is its best round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import find_support  # noqa: F401
from support_soak import serving_model

from girih.runtime.records.sampling_params import SamplingParams
from girih.serve.bench.config import DatasetConfig
from girih.serve.bench.datasets import make_requests
from girih.serve.offline.llm import LLM
from girih.serve.twin.fit import IDLE_SECONDS, read_trace

WORK = {"num_requests": 32, "input_len": 32, "output_len": 96}
IDLE = {"num_requests": 12, "input_len": 16, "output_len": 2}


def bench(url: str, folder: Path, seed: int, work: dict[str, int], *words: str) -> dict:
    """Run `girih bench serve`; returns its summary."""
    file = folder / "summary.json"
    settings = [f"dataset.{key}={value}" for key, value in work.items()]
    subprocess.run(
        [
            *(sys.executable, "-m", "girih.serve.cli.main", "bench", "serve", "-q"),
            *(f"base_url={url}", f"dataset.seed={seed}", "load.warmups=0", f"report.json={file}"),
            *settings,
            *words,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    summary = json.loads(file.read_text())
    assert summary["failed"] == 0, summary["errors"]
    return summary


def offline(llm: LLM, seed: int) -> float:
    """Output tokens per second of `LLM.generate`."""
    requests = make_requests(DatasetConfig(seed=seed, **WORK), as_text=False)
    params = SamplingParams(temperature=0.0, max_tokens=WORK["output_len"], ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": r.prompt} for r in requests], params)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / seconds


def throughput(folder: Path, rounds: int, words: list[str]) -> None:
    """Compare the two sides, in turns."""
    options = dict(word.split("=", 1) for word in words)
    llm = LLM("smollm2", **options)
    seen: dict[str, list[float]] = {"generate": [], "http": []}
    with serving_model("smollm2", words) as server:
        offline(llm, 1000)
        bench(server.url, folder, 1000, WORK)
        for seed in range(rounds):
            seen["generate"].append(offline(llm, seed))
            seen["http"].append(bench(server.url, folder, seed, WORK)["output_throughput"])
    llm.close()
    for name, values in seen.items():
        print(f"{name:<9} {', '.join(f'{value:.1f}' for value in values)} tokens/s")
    print(f"http / generate, best: {max(seen['http']) / max(seen['generate']):.3f}", flush=True)


def gaps(folder: Path, is_async: bool, words: list[str]) -> None:
    """Print the idle first token and the pauses of the runner."""
    trace = folder / f"trace-{is_async}.json"
    settings = [f"runtime.trace={trace}", f"runtime.async_scheduling={str(is_async).lower()}"]
    with serving_model("smollm2", [*settings, *words]) as server:
        bench(server.url, folder, 50, IDLE, "max_concurrency=1")
        idle = bench(server.url, folder, 51, IDLE, "max_concurrency=1")
        bench(server.url, folder, 52, {**WORK, "output_len": 48})
    steps = read_trace(str(trace))
    spans = list(zip(steps.started, steps.ended, steps.shapes, strict=True))
    prefills = [end - start for start, end, shape in spans if shape.tokens == IDLE["input_len"]]
    pauses = [
        later[0] - earlier[1]
        for earlier, later in itertools.pairwise(spans)
        if later[2].requests >= 32 and later[0] - earlier[1] < IDLE_SECONDS
    ]
    first = idle["latency_ms"]["ttft"]["median"]
    step = 1000 * statistics.median(prefills[len(prefills) // 2 :])
    print(
        f"async_scheduling={is_async}: idle first token {first:.1f} ms, prefill step {step:.1f} "
        f"ms, over it {first - step:.1f} ms; pause between steps at 32 requests "
        f"{1000 * statistics.median(pauses):.2f} ms",
        flush=True,
    )


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=("throughput", "gap"))
    parser.add_argument("words", nargs="*", help="settings of the engine, key=value")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if asked.only != "gap":
            throughput(Path(name), asked.rounds, asked.words)
        if asked.only != "throughput":
            for is_async in (True, False):
                gaps(Path(name), is_async, asked.words)


if __name__ == "__main__":
    main()
