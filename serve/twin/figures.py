"""Figures of a simulation, kept small however many requests there are.

A latency is counted in logarithmic bins: percentiles are right to half a percent, and a million
requests take no more memory than a thousand. Means, extremes and counts are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from girih.serve.bench.config import SloConfig
from girih.serve.bench.metrics import LATENCIES, keeps
from girih.serve.bench.records import RequestRecord

BIN = math.log(1.01)  # neighbours are 1 % apart, so the middle of a bin is at most 0.5 % off
ZERO = -(1 << 62)  # the bin of values that are not positive


class Distribution:
    """Values of one kind."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self._count = 0
        self._sum = self._squares = 0.0
        self._least, self._most = math.inf, -math.inf

    def add(self, value: float) -> None:
        """Count one value."""
        self._bins[math.floor(math.log(value) / BIN) if value > 0 else ZERO] += 1
        self._count += 1
        self._sum += value
        self._squares += value * value
        if value < self._least:
            self._least = value
        if value > self._most:
            self._most = value

    def describe(self, percentiles: Sequence[float], scale: float = 1.0) -> dict[str, float] | None:
        """Mean, median, deviation, extremes and percentiles, or None without values."""
        if not self._count:
            return None
        mean = self._sum / self._count
        figures = {
            "mean": mean,
            "median": self.percentile(50),
            "std": math.sqrt(max(0.0, self._squares / self._count - mean * mean)),
            "min": self._least,
            "max": self._most,
        }
        figures |= {f"p{rank:g}": self.percentile(rank) for rank in percentiles}
        return {name: value * scale for name, value in figures.items()}

    def percentile(self, rank: float) -> float:
        """The value that `rank` percent lie below, linear between neighbours; needs a value."""
        place = rank / 100 * (self._count - 1)
        low = self._value(int(place))
        high = self._value(min(int(place) + 1, self._count - 1))
        return low + (high - low) * (place - int(place))

    def _value(self, index: int) -> float:
        """The value at place `index` in sorted order, as its bin knows it."""
        seen = 0
        for place in sorted(self._bins):
            seen += self._bins[place]
            if seen > index:
                middle = 0.0 if place == ZERO else math.exp((place + 0.5) * BIN)
                return min(max(middle, self._least), self._most)
        return self._most


class Tally:
    """Counts requests as they end.

    Args:
        slo: limits of a good request.
    """

    def __init__(self, slo: SloConfig) -> None:
        self._slo = slo
        self._latencies = {name: Distribution() for name in LATENCIES}
        self._errors: Counter[str] = Counter()
        self.completed = self.kept = 0
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.seconds = 0.0
        self._second, self._in_second, self._peak_second = 0, 0, 0

    @property
    def failed(self) -> int:
        """Requests that were refused."""
        return self._errors.total()

    def token(self, now: float) -> None:
        """An output token came."""
        second = int(now)
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        self._peak_second = max(self._peak_second, self._in_second)

    def end(self, record: RequestRecord) -> None:
        """A request ended."""
        self.seconds = max(self.seconds, record.ended)
        if record.error is not None:
            self._errors[record.error] += 1
            return
        self.completed += 1
        self.kept += keeps(record, self._slo)
        self.input_tokens += record.num_prompt_tokens or 0
        self.cached_tokens += record.num_cached_tokens or 0
        self.output_tokens += record.num_output_tokens
        latencies = self._latencies
        for name, value in (("ttft", record.ttft), ("tpot", record.tpot)):
            if value is not None:
                latencies[name].add(value)
        latencies["e2e"].add(record.e2e)
        latencies["queue"].add(record.sent - record.due)
        add_gap = latencies["itl"].add
        for gap in record.itl:
            add_gap(gap)

    def summary(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """The figures, named as `girih bench serve` names them; latencies in ms."""
        seconds = max(self.seconds, 1e-9)
        summary: dict[str, Any] = {
            "interrupted": False,
            "completed": self.completed,
            "failed": self.failed,
            "seconds": self.seconds,
            "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "output_counted_by": "server",
            "request_throughput": self.completed / seconds,
            "output_throughput": self.output_tokens / seconds,
            "total_throughput": (self.input_tokens + self.output_tokens) / seconds,
            "peak_output_throughput": float(self._peak_second),
            "latency_ms": {
                name: values.describe(percentiles, 1000) for name, values in self._latencies.items()
            },
            "errors": dict(self._errors.most_common(5)),
        }
        limits = self._slo.limits()
        if limits:
            good = {"slo_ms": limits, "slo_kept": self.kept, "goodput": self.kept / seconds}
            summary |= good
        return summary
