"""What one long prompt does to 16 running answers: python tests/bench/measure_fairness.py.

For each setting of scheduler.target_step_ms a server of SmolLM2 gets 16 streams; when
all have tokens a prompt of 8,000 tokens arrives. Written: a plot of every gap between two pieces
over time (--out FILE), and on stdout the median and the 99th percentile of the gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import find_support  # noqa: F401
from support_soak import serving_model

from girih.serve.bench.client import EndpointClient
from girih.serve.bench.config import EndpointConfig
from girih.serve.bench.datasets import BenchRequest
from girih.serve.bench.metrics import percentile
from girih.serve.bench.plots import AMBER, BLUE, INK
from girih.serve.bench.records import RequestRecord

NUM_STREAMS, LONG_PROMPT = 16, 8000
DECODE_SECONDS = 2.0  # of undisturbed answers before the long prompt comes
Seen = tuple[list[RequestRecord], RequestRecord]


async def measure(url: str, output_len: int) -> Seen:
    """Run the streams and the long prompt; returns what their clients saw."""
    draw = random.Random(0)
    started = time.perf_counter()

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1000, 20000) for _ in range(length)]

    async with EndpointClient(EndpointConfig(url), lambda: time.perf_counter() - started) as client:
        await client.connect()
        await client.send(BenchRequest(-1, prompt(32), 8), RequestRecord(-1, 0.0))
        records = [RequestRecord(i, 0.0) for i in range(NUM_STREAMS)]
        streams = [
            asyncio.create_task(client.send(BenchRequest(r.index, prompt(32), output_len), r))
            for r in records
        ]
        while not all(len(record.pieces) > 3 for record in records):
            await asyncio.sleep(0.05)
        await asyncio.sleep(DECODE_SECONDS)
        long = RequestRecord(NUM_STREAMS, 0.0)
        await client.send(BenchRequest(long.index, prompt(LONG_PROMPT), 2), long)
        await asyncio.gather(*streams)
    for record in (*records, long):
        assert record.error is None, record.error
    return records, long


def gaps(records: Sequence[RequestRecord], since: float = 0.0) -> list[tuple[float, float]]:
    """(when, ms) of every gap between two pieces that ended after `since`, in order."""
    pairs = [
        (later, 1000 * gap)
        for record in records
        for later, gap in zip(record.pieces[1:], record.itl, strict=True)
        if later >= since
    ]
    return sorted(pairs)


def describe(name: str, seen: Seen) -> str:
    """The figures of one setting."""
    records, long = seen
    values = sorted(value for _, value in gaps(records))
    alone = sorted(value for moment, value in gaps(records) if moment < long.sent)
    median, p99, calm = percentile(values, 50), percentile(values, 99), percentile(alone, 50)
    return (
        f"{name}: median gap {median:.0f} ms, p99 {p99:.0f} ms ({p99 / median:.2f} times), longest "
        f"{values[-1]:.0f} ms; before the long prompt {calm:.0f} ms (p99 {p99 / calm:.2f} times "
        f"that); first token of the long prompt after {long.ttft:.1f} s"
    )


def plot(file: str, seen: dict[str, Seen]) -> None:
    """Draw every gap of every setting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * len(seen)), dpi=110, layout="constrained")
    axes = figure.subplots(len(seen), 1, sharey=True, squeeze=False)[:, 0]
    for panel, (name, (records, long)) in zip(axes, seen.items(), strict=True):
        start = records[0].sent
        moments, values = zip(*gaps(records), strict=True)
        panel.scatter([m - start for m in moments], values, s=3, color=BLUE, linewidths=0)
        panel.axvspan(long.sent - start, long.pieces[0] - start, color=AMBER, alpha=0.2, lw=0)
        ordered = sorted(values)
        panel.axhline(2.5 * percentile(ordered, 50), color=INK, lw=0.7, ls="--")
        panel.set(yscale="log", ylabel="ms between tokens")
        panel.set_title(f"{name}   (shaded: the prompt of 8,000 tokens)", fontsize=9, loc="left")
    axes[-1].set_xlabel("seconds; dashed: 2.5 times the median")
    figure.savefig(file)


def main() -> None:
    """Measure every setting, print and plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="serve/fairness.png")
    parser.add_argument("--targets", default="0,50,100,200", help="milliseconds")
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("words", nargs="*", help="settings of `girih serve`, key=value")
    asked = parser.parse_args()
    seen: dict[str, Seen] = {}
    for target in asked.targets.split(","):
        word = f"scheduler.target_step_ms={target}"
        with serving_model("smollm2", [word, *asked.words]) as server:
            name = word.removeprefix("scheduler.")
            seen[name] = asyncio.run(measure(server.url, asked.output_len))
        print(describe(name, seen[name]), flush=True)
    plot(asked.out, seen)
    print(Path(asked.out))


if __name__ == "__main__":
    main()
