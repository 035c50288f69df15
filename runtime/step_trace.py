"""Writes what each step did as Chrome trace events (open the file in Perfetto or chrome://tracing).

    scheduler row   schedule … update                 one event per part of a step,
    runner row      prepare, run, sample              with its requests and tokens

The file is a JSON array that is never closed while the engine runs; viewers accept that.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from girih.runtime.observers import CoreObserver, StepReport

SCHEDULER, RUNNER = 1, 2
FLUSH_EVENTS = 512


class StepTracer(CoreObserver):
    """Watches a core and writes `path`.

    Args:
        path: file to write, replaced when it exists.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._file.write(b"[\n")
        self._pid = os.getpid()
        self._events: list[bytes] = []
        for row, name in ((SCHEDULER, "scheduler"), (RUNNER, "runner")):
            self._add({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})
        self.flush()

    def on_step(self, report: StepReport) -> None:
        """Write one step."""
        plan = report.plan
        notes = {
            "step": plan.step_id,
            "requests": len(plan.num_scheduled_tokens),
            "tokens": plan.total_tokens,
            "new": [new.request_id for new in plan.new_requests],
            "preempted": list(plan.preempted_ids),
        }
        self._span(SCHEDULER, "schedule", report.scheduled, report.submitted, notes)
        self._span(SCHEDULER, "update", report.received, report.updated, {"step": plan.step_id})
        times = report.times
        if times is None:
            self._span(RUNNER, "run", report.started, report.ended, notes)
        else:
            prepared = report.started + times.prepare
            self._span(RUNNER, "prepare", report.started, prepared, notes)
            self._span(RUNNER, "run", prepared, prepared + times.run, notes)
            self._span(RUNNER, "sample", prepared + times.run, report.ended, notes)
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()

    def flush(self) -> None:
        """Write what was noted so far."""
        self._file.write(b"".join(self._events))
        self._file.flush()
        self._events.clear()

    def close(self) -> None:
        """Write the rest and close the file."""
        self.flush()
        self._file.close()

    def _span(self, row: int, name: str, start: float, end: float, notes: dict[str, Any]) -> None:
        microseconds = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        self._add({"ph": "X", "name": name, "tid": row, **microseconds, "args": notes})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(msgspec.json.encode({"pid": self._pid, **event}) + b",\n")
