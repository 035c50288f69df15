"""When each request is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence

from girih.serve.bench.config import LoadConfig
from girih.serve.bench.datasets import BenchRequest


def arrival_times(requests: Sequence[BenchRequest], load: LoadConfig, seed: int = 0) -> list[float]:
    """Return the sending time of each request, in seconds after the start.

    A trace's own times hold where it has them; else gaps are drawn from a gamma distribution
    with the mean 1 / rate and the shape `burstiness`.
    """
    return [due for due, _ in arrivals(requests, len(requests), load, seed)]


def arrivals(
    requests: Iterable[BenchRequest], total: int, load: LoadConfig, seed: int = 0
) -> Iterator[tuple[float, BenchRequest]]:
    """Yield each request with its sending time, see `arrival_times`.

    Args:
        requests: `total` of them.
        total: how many there are; a ramp ends with the last.
        load: when they are sent.
        seed: of the gaps.
    """
    draw = random.Random(seed)
    now = 0.0
    for place, request in enumerate(requests):
        if request.at is not None:
            yield request.at / load.speed, request
            continue
        rate = _rate(load, place / max(1, total - 1))
        if place and not math.isinf(rate):
            now += draw.gammavariate(load.burstiness, 1 / (rate * load.burstiness))
        yield now, request


def _rate(load: LoadConfig, progress: float) -> float:
    """Return the rate when the share `progress` of the requests was sent."""
    start, end = load.ramp_start, load.ramp_end
    if load.ramp == "linear":
        return start + (end - start) * progress
    if load.ramp == "exponential":
        return float(start * (end / start) ** progress)
    return load.request_rate
