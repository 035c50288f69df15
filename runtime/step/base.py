"""Base of runners: a plan becomes a step, the step's rows become a result.

    plan → update → [ gather → ReplayManager.run → read ] → commit → result
                      again for each half of the requests where it raises (`isolation.py`)

Owns nothing of its own: rows belong to the batch, device memory to the executable and its replays,
requests to the scheduler.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from typing import Generic, TypeVar

import msgspec
import torch

from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput, StepTimes
from girih.runtime.step.batch import PersistentBatch, StepBatch
from girih.runtime.step.replay import ReplayManager
from girih.runtime.step.resident import ResidentRunner

R = TypeVar("R")


class StepRunner(ResidentRunner, Generic[R]):
    """A runner behind the scheduler; subclasses say what its rows mean.

    Args:
        replays: runs the steps of the bound program.
        batch: the rows of running requests.
        threads: compute threads.
    """

    def __init__(self, replays: ReplayManager, batch: PersistentBatch, threads: int) -> None:
        self.replays = replays
        self.executable = replays.executable
        self.batch = batch
        self._threads = threads
        self._calling_thread: int | None = None
        self._seconds = [0.0, 0.0, 0.0]  # of the running step, as in `StepTimes`

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; see `ModelRunner.execute`."""
        if self._calling_thread != threading.get_ident():  # OpenMP keeps the count per thread
            self._calling_thread = threading.get_ident()
            torch.set_num_threads(self._threads)
        started = time.perf_counter()
        failures = self.batch.failures
        self.batch.update(plan)
        self.update(plan)
        self._seconds = [time.perf_counter() - started, 0.0, 0.0]
        done = self._run_spared(plan, failures.spared(plan.num_scheduled_tokens))
        committing = time.perf_counter()
        result = ModelRunnerOutput(plan.step_id)
        for step, found in done:
            self.commit(step, found, result)
        self._seconds[2] += time.perf_counter() - committing
        return msgspec.structs.replace(
            result,
            errors=failures.texts(plan.num_scheduled_tokens),
            times=StepTimes(*self._seconds),
            dispatch=self.replays.explanation,
        )

    def _run_spared(
        self, plan: SchedulerOutput, request_ids: list[str]
    ) -> list[tuple[StepBatch, R]]:
        """Run the step, in parts when it fails as a whole.

        Raises:
            Exception: it failed for every request, which says nothing about any of them.
        """
        failures = self.batch.failures
        if self.executable.layout.state_specs:  # a state that was advanced cannot be taken back
            return [self._run(plan, request_ids)] if request_ids else []
        parts = failures.split(request_ids, lambda part: self._run(plan, request_ids[part]))
        if request_ids and not parts:
            raise failures.cause(request_ids[0])
        return [found for _, found in parts]

    def _run(self, plan: SchedulerOutput, request_ids: list[str]) -> tuple[StepBatch, R]:
        """One step of some requests; may be repeated, as nothing of it is taken in yet."""
        started = time.perf_counter()
        step = self.batch.gather(plan, request_ids)
        prepared = time.perf_counter()
        rows = self.replays.run(step.inputs)
        ran = time.perf_counter()
        found = self.read(step, rows)
        spent = (prepared - started, ran - prepared, time.perf_counter() - ran)
        self._seconds = [a + b for a, b in zip(self._seconds, spent, strict=True)]
        return step, found

    @abstractmethod
    def update(self, plan: SchedulerOutput) -> None:
        """Take in which requests come and go; the batch's rows are up to date."""

    @abstractmethod
    def read(self, step: StepBatch, rows: torch.Tensor) -> R:
        """Turn the program's rows [S, ...], valid until the next step, into results."""

    @abstractmethod
    def commit(self, step: StepBatch, found: R, result: ModelRunnerOutput) -> None:
        """Take in what was read, advance the batch, and add to the result."""
