"""Writes what each step did as Chrome trace events (open the file in Perfetto or chrome://tracing).

    scheduler row   arrive, schedule … update         one event per part of a step,
    runner row      prepare, run, sample              with its requests and tokens

The first event, "engine", says what the engine has. The file is a JSON array that is never closed
while the engine runs; viewers accept that. `girih simulate fit` reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from girih.runtime.engine.observers import CoreObserver, StepReport, arrival_of
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.schedule.step_shape import shape_of

SCHEDULER, RUNNER = 1, 2
FLUSH_EVENTS = 512


class StepTracer(CoreObserver):
    """Watches a core and writes `path`.

    Args:
        path: file to write, replaced when it exists.
        scheduler: what it has to give is told in the first event.
    """

    def __init__(self, path: Path, scheduler: Scheduler) -> None:
        self._file = path.open("wb")
        self._file.write(b"[\n")
        self._pid = os.getpid()
        self._events: list[bytes] = []
        self._without_token: set[str] = set()
        kv_cache = scheduler.kv_cache
        engine = {
            "num_blocks": kv_cache.pool.num_usable + 1,
            "block_size": kv_cache.block_size,
            "max_model_len": scheduler.limits.max_model_len,
            "windows": [group.window for group in kv_cache.groups],
            "chunks": [group.chunk for group in kv_cache.groups],
        }
        self._add({"ph": "M", "name": "engine", "tid": SCHEDULER, "args": engine})
        for row, name in ((SCHEDULER, "scheduler"), (RUNNER, "runner")):
            self._add({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name}})
        self.flush()

    def on_request(self, request: EngineRequest) -> None:
        """Write an arrival."""
        self._without_token.add(request.request_id)
        self._add(
            {
                "ph": "i",
                "s": "t",
                "name": "arrive",
                "tid": SCHEDULER,
                "ts": arrival_of(request) * 1e6,
                "args": {"request": request.request_id},
            }
        )

    def on_end(self, outputs: list[EngineOutput]) -> None:
        """Forget requests that ended between steps."""
        self._without_token.difference_update(output.request_id for output in outputs)

    def on_step(self, report: StepReport) -> None:
        """Write one step."""
        plan = report.plan
        shape = shape_of(plan)
        answered = {output.request_id for output in report.outputs} & self._without_token
        self._without_token -= answered
        notes = {
            "step": plan.step_id,
            **msgspec.structs.asdict(shape),
            "new": [new.request_id for new in plan.new_requests],
            "preempted": list(plan.preempted_ids),
        }
        self._span(SCHEDULER, "schedule", report.scheduled, report.submitted, notes)
        ends = {"step": plan.step_id, "first_tokens": sorted(answered)}
        self._span(SCHEDULER, "update", report.received, report.updated, ends)
        times = report.times
        if report.dispatch:
            notes = {**notes, "mode": report.dispatch}
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
