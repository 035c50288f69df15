"""From records to figures: latencies, throughput, goodput."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from girih.serve.bench.config import SloConfig
from girih.serve.bench.load import Measurement
from girih.serve.bench.records import RequestRecord

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "gap between pieces",
    "e2e": "whole request",
    "queue": "sent after due",
}


def summarize(
    measurement: Measurement, slo: SloConfig, percentiles: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a measurement; latencies in ms, rates per second."""
    good = [record for record in measurement.records if record.error is None]
    seconds = max(measurement.seconds, 1e-9)
    num_output = sum(record.num_output_tokens for record in good)
    num_input = sum(record.num_prompt_tokens or 0 for record in good)
    summary: dict[str, Any] = {
        "model": measurement.model,
        "interrupted": measurement.interrupted,
        "completed": len(good),
        "failed": len(measurement.records) - len(good),
        "seconds": measurement.seconds,
        "input_tokens": num_input,
        "cached_tokens": sum(record.num_cached_tokens or 0 for record in good),
        "output_tokens": num_output,
        "output_counted_by": _counted_by(good),
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_throughput": (num_input + num_output) / seconds,
        "peak_output_throughput": max(output_per_second(good), default=0.0),
        "peak_concurrency": peak_concurrency(measurement.records),
        "latency_ms": {
            name: describe(values, percentiles) for name, values in latencies_ms(good).items()
        },
        "errors": dict(Counter(r.error for r in measurement.records if r.error).most_common(5)),
    }
    if slo.limits():
        kept = sum(keeps(record, slo) for record in good)
        summary |= {"slo_ms": slo.limits(), "slo_kept": kept, "goodput": kept / seconds}
    return summary


def latencies_ms(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return every latency of the records, in ms, by the names of `LATENCIES`."""
    values: dict[str, list[float | None]] = {
        "ttft": [record.ttft for record in records],
        "tpot": [record.tpot for record in records],
        "itl": [gap for record in records for gap in record.itl],
        "e2e": [record.e2e for record in records],
        "queue": [record.sent - record.due for record in records],
    }
    return {
        name: [value * 1000 for value in seconds if value is not None]
        for name, seconds in values.items()
    }


def describe(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """Return mean, median, deviation, extremes and percentiles, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    figures = {
        "mean": statistics.fmean(ordered),
        "median": percentile(ordered, 50),
        "std": statistics.pstdev(ordered),
        "min": ordered[0],
        "max": ordered[-1],
    }
    return figures | {f"p{rank:g}": percentile(ordered, rank) for rank in percentiles}


def percentile(ordered: Sequence[float], rank: float) -> float:
    """Return a percentile of sorted values, linear between neighbours."""
    place = (len(ordered) - 1) * rank / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def keeps(record: RequestRecord, slo: SloConfig) -> bool:
    """Return whether a request keeps all limits that are set; a missing value counts as kept."""
    if record.error is not None:
        return False
    seen = {
        "ttft": record.ttft,
        "tpot": record.tpot,
        "itl": max(record.itl, default=None),
        "e2e": record.e2e,
    }
    pairs = [(seen[name], limit) for name, limit in slo.limits().items()]
    return all(value is None or value * 1000 <= limit for value, limit in pairs)


def output_per_second(records: Sequence[RequestRecord]) -> list[float]:
    """Return output tokens in each second; a request's tokens count evenly over its pieces."""
    buckets: Counter[int] = Counter()
    for record in records:
        if record.pieces:
            share = record.num_output_tokens / len(record.pieces)
            for moment in record.pieces:
                buckets[int(moment)] += share  # type: ignore[assignment]
    return [float(buckets[second]) for second in range(max(buckets, default=-1) + 1)]


def concurrency_steps(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Return (seconds, requests under way from then on) at every change."""
    changes = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])
    steps, running = [(0.0, 0)], 0
    for moment, change in changes:
        running += change
        steps.append((moment, running))
    return steps


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were under way together."""
    return max(running for _, running in concurrency_steps(records))


def _counted_by(records: Sequence[RequestRecord]) -> str:
    by_server = all(record.counted_by == "server" for record in records)
    return "server" if by_server else "pieces"
