"""Profiles the steps of a core with torch's profiler, on request, into a Chrome trace.

    start ─▶ torch.profiler in the runner's thread ─▶ stop ─▶ DIR/girih-PID-N.json
                     + what `runtime.trace` writes of each step, on rows of its own

Open the file in Perfetto or chrome://tracing. Profiling slows the steps down; nothing is recorded
without it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
from torch.profiler import ProfilerActivity, profile

from girih.kernels.base.errors import BusyError, EngineError
from girih.runtime.engine.observers import CoreObserver, StepReport
from girih.runtime.observe.step_trace import StepTracer
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.schedule.scheduler import Scheduler


class StepProfiler(CoreObserver):
    """Profiles a core while it is told to; `start` and `stop` run in the runner's thread.

    Args:
        folder: where traces are written; made when the first one is.
        scheduler: of the core.
    """

    def __init__(self, folder: Path, scheduler: Scheduler) -> None:
        self._folder = folder
        self._scheduler = scheduler
        self._number = 0
        self._running: tuple[profile, StepTracer] | None = None

    def start(self) -> None:
        """Begin.

        Raises:
            BusyError: it has begun already.
            EngineError: the folder cannot be written to.
        """
        if self._running is not None:
            raise BusyError("the profiler runs already; stop it first")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            steps = StepTracer(self._path(".steps"), self._scheduler)
        except OSError as error:
            raise EngineError(f"no traces can be written (runtime.profile_dir): {error}") from error
        running = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        running.start()
        self._running = (running, steps)

    def stop(self) -> str:
        """End, and write the trace.

        Returns:
            The file.

        Raises:
            BusyError: it has not begun.
            EngineError: the file cannot be written.
        """
        if self._running is None:
            raise BusyError("the profiler does not run; start it first")
        (running, steps), self._running = self._running, None
        running.stop()
        steps.close()
        path, own = self._path(".json"), self._path(".steps")
        self._number += 1
        try:
            running.export_chrome_trace(str(path))
            _add_steps(path, own.read_text())
            own.unlink()
        except OSError as error:
            raise EngineError(f"no trace was written (runtime.profile_dir): {error}") from error
        return str(path)

    def on_request(self, request: EngineRequest) -> None:
        """A request was taken in."""
        if self._running is not None:
            self._running[1].on_request(request)

    def on_step(self, report: StepReport) -> None:
        """A step was digested."""
        if self._running is not None:
            self._running[1].on_step(report)

    def on_end(self, outputs: list[EngineOutput]) -> None:
        """Requests ended between steps."""
        if self._running is not None:
            self._running[1].on_end(outputs)

    def _path(self, ending: str) -> Path:
        return self._folder / f"girih-{os.getpid()}-{self._number}{ending}"


def _add_steps(path: Path, steps: str) -> None:
    """Put what a `StepTracer` wrote into torch's trace, whose clock counts from a time it names."""
    trace = json.loads(path.read_bytes())
    ahead = time.time_ns() - time.monotonic_ns() - trace.get("baseTimeNanoseconds", 0)
    events = json.loads(steps.rstrip().rstrip(",") + "]")
    for event in events:
        if "ts" in event:
            event["ts"] += ahead / 1e3
    trace["traceEvents"] += events
    path.write_bytes(msgspec.json.encode(trace))
