"""The engine core: requests in, one step at a time, outputs out.

    add_request ─▶ Scheduler.schedule ─▶ ModelRunner.execute ─▶ Scheduler.update ─▶ EngineOutput

One thread owns a core; nothing here locks. What happens when the runner raises:
- an ordinary exception ends the requests of that plan with finish reason "error" (their blocks
  are freed, waiting requests go on);
- `EngineError`, or MAX_FAILURES_IN_A_ROW failed steps, ends the core: every request gets an
  "error" output from that `step`, later calls raise `EngineError`;
- `KeyboardInterrupt` and the like are passed on; the plan is taken back first and its requests
  will be computed anew, so the core stays usable.
"""

from __future__ import annotations

import logging
import time

import msgspec

from girih.kernels.errors import EngineError
from girih.runtime.executor import ModelRunner, SchedulerOutput
from girih.runtime.kv_cache import KVCacheStats
from girih.runtime.request import EngineOutput, EngineRequest
from girih.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start, and the state now.

    Attributes:
        num_running: requests that hold blocks.
        num_waiting: requests in the queue.
        num_steps: steps that ran.
        num_failed_steps: steps whose runner raised.
        num_preemptions: how often a request lost its blocks.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_generated_tokens: output tokens.
        finished: finish reason -> requests.
        schedule_seconds: time spent making plans.
        run_seconds: time spent in the runner.
        update_seconds: time spent digesting results.
        kv_cache: the KV cache's counters.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_failed_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generated_tokens: int
    finished: dict[str, int]
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    kv_cache: KVCacheStats


class EngineCore:
    """Runs requests to their end.

    Args:
        scheduler: owns the requests.
        runner: computes the plans.

    Attributes:
        failure: why the core died, or None while it lives.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.failure: str | None = None
        self._num_steps = 0
        self._num_failed_steps = 0
        self._failures_in_a_row = 0
        self._seconds = [0.0, 0.0, 0.0]  # schedule, run, update

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served as it stands.
            QueueFullError: too many requests wait.
            EngineError: the core died.
        """
        self._check_alive()
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> list[EngineOutput]:
        """End requests now and free their blocks; unknown ids are ignored.

        Returns:
            One record with finish reason "abort" for each that was unfinished.
        """
        return self.scheduler.finish_requests(request_ids, "abort")

    def has_work(self) -> bool:
        """Whether a `step` would find unfinished requests."""
        return self.scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Plan, run and digest one step.

        Returns:
            One record per request that got tokens or ended; empty without work.

        Raises:
            EngineError: the core died in an earlier step.
        """
        self._check_alive()
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        planned = time.perf_counter()
        self._seconds[0] += planned - started
        if plan is None:
            return []
        try:
            result = self.runner.execute(plan)
            ran = time.perf_counter()
            self._seconds[1] += ran - planned
            outputs = self.scheduler.update(result)
        except Exception as error:
            return self._fail(plan, error)
        except BaseException:
            self.scheduler.preempt_requests(self.scheduler.roll_back(plan.step_id))
            raise
        self._seconds[2] += time.perf_counter() - ran
        self._num_steps += 1
        self._failures_in_a_row = 0
        return outputs

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (for example after the weights changed)."""
        self.scheduler.kv_cache.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters up to now."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_steps=self._num_steps,
            num_failed_steps=self._num_failed_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            finished=dict(scheduler.finished),
            schedule_seconds=self._seconds[0],
            run_seconds=self._seconds[1],
            update_seconds=self._seconds[2],
            kv_cache=scheduler.kv_cache.stats(),
        )

    def check_integrity(self) -> None:
        """Raise `EngineError` when queues, requests and blocks disagree."""
        self.scheduler.check_integrity()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine core died: {self.failure}")

    def _fail(self, plan: SchedulerOutput, error: Exception) -> list[EngineOutput]:
        """End what the failed plan ran, or everything when the core cannot go on."""
        logger.error("step %d failed", plan.step_id, exc_info=error)
        self._num_failed_steps += 1
        self._failures_in_a_row += 1
        text = f"{type(error).__name__}: {error}"
        self.scheduler.roll_back(plan.step_id)
        failed = list(plan.num_scheduled_tokens)
        if isinstance(error, EngineError) or self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.failure = text
            failed = list(self.scheduler.requests)
        return self.scheduler.finish_requests(failed, "error", error=text)
