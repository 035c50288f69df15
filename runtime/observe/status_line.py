"""One log line per interval that says what the engine is doing."""

from __future__ import annotations

import logging
import time

from girih.runtime.engine.core import EngineCore, EngineStats
from girih.runtime.engine.observers import CoreObserver, StepReport
from girih.runtime.records.request import EngineRequest
from girih.runtime.step.buckets import ReplayStats

logger = logging.getLogger("girih.engine")


class StatusLine(CoreObserver):
    """Watches a core; silent while it is idle.

    Args:
        core: the engine core.
        seconds: between lines.
    """

    def __init__(self, core: EngineCore, seconds: float) -> None:
        self._core = core
        self._seconds = seconds
        self._since = time.monotonic()
        self._before = core.stats()

    def on_request(self, request: EngineRequest) -> None:
        """A core that was idle starts a new interval."""
        if not self._core.scheduler.running:
            self._since, self._before = time.monotonic(), self._core.stats()

    def on_step(self, report: StepReport) -> None:
        """Log when the interval is over."""
        elapsed = report.updated - self._since
        if elapsed < self._seconds:
            return
        stats = self._core.stats()
        logger.info(status_text(self._before, stats, elapsed))
        self._since, self._before = report.updated, stats


def status_text(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """The line for an interval of `seconds` between two looks at the counters."""
    cache, old_cache = now.kv_cache, before.kv_cache
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    output = (now.num_generated_tokens - before.num_generated_tokens) / seconds
    queries = cache.prefix_queries - old_cache.prefix_queries
    hits = cache.prefix_hits - old_cache.prefix_hits
    return (
        f"running {now.num_running}, waiting {now.num_waiting}, prompt {prompt:.0f} tok/s, "
        f"output {output:.0f} tok/s, KV {cache.usage:.0%}, "
        f"prefix hits {hits / queries if queries else 0:.0%}, "
        f"preemptions {now.num_preemptions - before.num_preemptions}"
        f"{_replay_text(before.replay, now.replay)}"
    )


def _replay_text(before: ReplayStats | None, now: ReplayStats | None) -> str:
    """Which part of the steps was captured, and of their rows padding; empty without captures."""
    if before is None or now is None:
        return ""
    captured = now.num_captured - before.num_captured
    if not captured:
        return ""
    steps = now.num_steps - before.num_steps
    padded = now.num_padded - before.num_padded
    rows = now.num_captured_tokens - before.num_captured_tokens + padded
    return f", captured {captured / steps:.0%} (padding {padded / rows:.0%})"
