"""What runners of a program share: a plan becomes a step, the step's rows become a result.

    plan → PersistentBatch.prepare → inputs → ReplayManager.run → finish → result

Owns nothing of its own: rows belong to the batch, device memory to the executable and its replays,
requests to the scheduler.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

import msgspec
import torch

from girih.graph.executable import StepInputs
from girih.runtime.batch import PersistentBatch, StepBatch
from girih.runtime.executor import ModelRunnerOutput, SchedulerOutput, StepTimes
from girih.runtime.replay import ReplayManager
from girih.runtime.resident import ResidentRunner


class StepRunner(ResidentRunner):
    """A runner behind the scheduler; subclasses say what they want of a step and make of its rows.

    Args:
        replays: runs the steps of the bound program.
        batch: the rows of running requests.
        threads: compute threads.
    """

    def __init__(self, replays: ReplayManager, batch: PersistentBatch, threads: int) -> None:
        self.replays = replays
        self.executable = replays.executable
        self.batch = batch
        self._threads = _CallingThread(threads)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one plan; see `ModelRunner.execute`."""
        self._threads.prepare()
        started = time.perf_counter()
        step = self.batch.prepare(plan)
        inputs = self.inputs(plan, step)
        prepared = time.perf_counter()
        rows = self.replays.run(inputs)
        ran = time.perf_counter()
        result = self.finish(plan, step, rows)
        times = StepTimes(prepared - started, ran - prepared, time.perf_counter() - ran)
        return msgspec.structs.replace(result, times=times, dispatch=self.replays.explanation)

    @abstractmethod
    def inputs(self, plan: SchedulerOutput, step: StepBatch) -> StepInputs:
        """What the program is given."""

    @abstractmethod
    def finish(
        self, plan: SchedulerOutput, step: StepBatch, rows: torch.Tensor
    ) -> ModelRunnerOutput:
        """Make the result of the plan from the program's rows [S, ...] and advance the batch."""


class _CallingThread:
    """OpenMP keeps the thread count per calling thread: it is set where the steps run.

    Args:
        threads: compute threads.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._known: int | None = None

    def prepare(self) -> None:
        """Make this thread compute with the wanted number of threads."""
        thread = threading.get_ident()
        if thread != self._known:
            torch.set_num_threads(self._threads)
            self._known = thread


def step_inputs(step: StepBatch) -> StepInputs:
    """What every program is given of a step."""
    return StepInputs(
        ids=step.ids,
        positions=step.positions,
        logits_index=step.logits_index,
        query_start=step.query_start,
        seq_lens=step.seq_lens,
        block_table=step.block_table,
        slot_mapping=step.slot_mapping,
        state_slots=step.state_slots,
    )
