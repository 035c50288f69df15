"""When each request is sent."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from girih.serve.bench.config import LoadConfig
from girih.serve.bench.datasets import BenchRequest


def arrival_times(requests: Sequence[BenchRequest], load: LoadConfig, seed: int = 0) -> list[float]:
    """Return the sending time of each request, in seconds after the start.

    A trace's own times hold where it has them; else gaps are drawn from a gamma distribution
    with the mean 1 / rate and the shape `burstiness`.
    """
    draw = random.Random(seed)
    now = 0.0
    times: list[float] = []
    for place, request in enumerate(requests):
        if request.at is not None:
            times.append(request.at / load.speed)
            continue
        rate = _rate(load, place / max(1, len(requests) - 1))
        if place and not math.isinf(rate):
            now += draw.gammavariate(load.burstiness, 1 / (rate * load.burstiness))
        times.append(now)
    return times


def _rate(load: LoadConfig, progress: float) -> float:
    """Return the rate when the share `progress` of the requests was sent."""
    start, end = load.ramp_start, load.ramp_end
    if load.ramp == "linear":
        return start + (end - start) * progress
    if load.ramp == "exponential":
        return float(start * (end / start) ** progress)
    return load.request_rate
