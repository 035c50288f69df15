"""One engine on a clock that is not real: its scheduler and block pool, and a cost for each step.

    submit(request, now) ─▶ EngineCore.add_request
    wake(now)            ─▶ EngineCore.plan_ahead; an idle runner takes up the oldest plan
    finish_step(now)     ─▶ EngineCore.digest ─▶ outputs

`EngineCore`, `Scheduler`, `KVCacheManager` and `BlockPool` are the engine's own; only the runner
and the queue in front of it are replaced. Tokens have no meaning: each is 0, and a request ends by
its length. Cached prefixes are found through the same hashes of the same blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from girih.kernels.base.errors import EngineError
from girih.runtime.engine.core import PLANS_IN_FLIGHT, EngineCore
from girih.runtime.engine.plan_queue import Finished, call_now
from girih.runtime.records.config import CacheConfig, SchedulerConfig
from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.schedule.step_shape import shape_of
from girih.serve.twin.cost import MeasuredEngine, StepClock, StepCost

T = TypeVar("T")
TOKEN = [0]
"""What every request gets from a step; the scheduler copies it."""


class TimelessRunner:
    """Answers every plan at once; what the plan costs is the replica's affair."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request (those whose prompt is not done yet ignore it)."""
        return ModelRunnerOutput(plan.step_id, dict.fromkeys(plan.num_scheduled_tokens, TOKEN))


class TimelessQueue:
    """Plans in flight; a `PlanQueue` whose owner says when the oldest one has run.

    Args:
        runner: makes the results.
    """

    def __init__(self, runner: TimelessRunner) -> None:
        self._runner = runner
        self.plans: deque[SchedulerOutput] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        """See `PlanQueue.submit`."""
        self.plans.append(plan)

    def has_result(self) -> bool:
        """See `PlanQueue.has_result`."""
        return bool(self.plans)

    def wait(self) -> Finished:
        """See `PlanQueue.wait`."""
        return Finished(self._runner.execute(self.plans[0]), 0.0, 0.0)

    def forget(self, num_plans: int) -> None:
        """See `PlanQueue.forget`."""
        for _ in range(num_plans):
            self.plans.popleft()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """See `PlanQueue.call`."""
        return call_now(work)

    def close(self) -> None:
        """See `PlanQueue.close`."""


class Replica:
    """One engine.

    Args:
        limits: of a step.
        cache: the KV cache; `num_blocks` is set.
        engine: what it has besides: model length and KV groups.
        cost: of steps.
        async_scheduling: plan one step ahead.

    Attributes:
        core: the engine core.
        step_ends: when the running step ends; None while the runner is idle.
        num_tokens: computed so far.
        busy_seconds: the runner was busy so far.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: CacheConfig,
        engine: MeasuredEngine,
        cost: StepCost,
        async_scheduling: bool,
    ) -> None:
        assert cache.num_blocks is not None
        plans = PLANS_IN_FLIGHT if async_scheduling else 1
        kv_cache = KVCacheManager(
            cache.num_blocks,
            cache.block_size,
            cache.enable_prefix_caching,
            engine.groups,
            plans * limits.max_num_batched_tokens,
        )
        runner = TimelessRunner()
        self._queue = TimelessQueue(runner)
        self.core = EngineCore(
            Scheduler(limits, kv_cache, engine.max_model_len), runner, async_scheduling, self._queue
        )
        self._clock = StepClock(cost)
        self._gap = cost.gap
        self.step_ends: float | None = None
        self.num_tokens = 0
        self.busy_seconds = 0.0

    @property
    def num_unfinished(self) -> int:
        """Requests it has."""
        return len(self.core.scheduler.requests)

    @property
    def free_share(self) -> float:
        """Share of the KV blocks without references, 0 to 1."""
        pool = self.core.scheduler.kv_cache.pool
        return pool.num_free / pool.num_usable

    def submit(self, request: EngineRequest) -> None:
        """Hand over a request; `wake` follows.

        Raises:
            RequestError, QueueFullError: as the engine refuses it.
        """
        self.core.add_request(request)

    def wake(self, now: float) -> bool:
        """Plan ahead and start a step if none runs; whether one was started."""
        self.core.plan_ahead()
        return self._start_step(now)

    def finish_step(self, now: float) -> list[EngineOutput]:
        """Digest the step that ends now; the next one begins if there is a plan."""
        outputs = self.core.digest()
        if self.core.failure is not None:
            raise EngineError(f"the simulated engine died: {self.core.failure}")
        self.step_ends = None
        self.core.plan_ahead()
        self._start_step(now + self._gap)
        return outputs

    def _start_step(self, now: float) -> bool:
        if self.step_ends is not None or not self._queue.plans:
            return False
        shape = shape_of(self._queue.plans[0])
        seconds = self._clock.seconds(shape)
        self.step_ends = now + seconds
        self.num_tokens += shape.tokens
        self.busy_seconds += seconds
        return True
