"""One engine on a clock that is not real: its scheduler and block pool, and a cost for each step.

    submit(request, now) ─▶ CoreClient.add
    wake(now)            ─▶ CoreLoop plans; an idle runner takes up the oldest plan
    finish_step(now)     ─▶ CoreLoop processes its result ─▶ outputs

`CoreLoop`, `EngineCore`, `Scheduler`, `KVCacheManager` and `BlockPool` are the real ones; only the
runner and the queue in front of it are replaced. Tokens have no meaning: each is 0, and a request
ends by its length. Cached prefixes are found through the same hashes of the same blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from girih.kernels.base.errors import EngineError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import SteppedTransport
from girih.runtime.engine.core import PLANS_IN_FLIGHT, EngineCore
from girih.runtime.engine.plan_queue import Finished, call_now
from girih.runtime.records.config import CacheConfig, SchedulerConfig
from girih.runtime.records.messages import Admission, EngineFacts
from girih.runtime.records.plans import ModelRunnerOutput, SchedulerOutput
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.schedule.step_shape import shape_of
from girih.serve.twin.cost import MeasuredEngine, StepClock, StepCost

T = TypeVar("T")
TOKEN = [0]
"""The tokens that every request gets from a step; the scheduler copies them."""


class TimelessRunner:
    """Answers every plan at once; what the plan costs is the replica's affair."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each request (those whose prompt is not done yet ignore it)."""
        return ModelRunnerOutput(plan.step_id, dict.fromkeys(plan.num_scheduled_tokens, TOKEN))


class TimelessQueue:
    """Plans in flight; a `PlanQueue` whose owner says when the oldest one has run.

    Args:
        runner: makes the results.

    Attributes:
        plans: in flight, the oldest first.
        has_run: the oldest one has.
        seconds: it took.
    """

    def __init__(self, runner: TimelessRunner) -> None:
        self._runner = runner
        self.plans: deque[SchedulerOutput] = deque()
        self.has_run = False
        self.seconds = 0.0

    def submit(self, plan: SchedulerOutput) -> None:
        """See `PlanQueue.submit`."""
        self.plans.append(plan)

    def has_result(self) -> bool:
        """See `PlanQueue.has_result`."""
        return self.has_run

    def wait(self) -> Finished:
        """See `PlanQueue.wait`."""
        self.has_run = False
        return Finished(self._runner.execute(self.plans[0]), 0.0, self.seconds)

    def forget(self, num_plans: int) -> None:
        """See `PlanQueue.forget`."""
        for _ in range(num_plans):
            self.plans.popleft()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """See `PlanQueue.call`."""
        return call_now(work)

    def close(self) -> None:
        """See `PlanQueue.close`."""


@dataclass(frozen=True)
class SimulatedEngine:
    """The simulated engine that a `CoreClient` runs."""

    core: EngineCore
    facts: EngineFacts


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
        facts = EngineFacts(
            name="twin", key="", model_path="", max_model_len=engine.max_model_len, vocab_size=1
        )
        simulated = SimulatedEngine(self.core, facts)
        self._client = CoreClient(SteppedTransport(lambda progress: simulated))
        self._client.start()
        self._client.poll()
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
        self._client.add([request])
        for event in self._client.poll():
            if isinstance(event, Admission) and event.refusal is not None:
                raise event.refusal.as_error()

    def wake(self, now: float) -> bool:
        """Plan ahead and start a step if none runs; whether one was started."""
        self._take_turn()
        return self._start_step(now)

    def finish_step(self, now: float) -> list[EngineOutput]:
        """Process the step that ends now; the next one begins if there is a plan."""
        self._queue.has_run = True
        outputs = self._take_turn()
        if self._client.error is not None:
            raise EngineError(f"the simulated engine died: {self._client.error}")
        self.step_ends = None
        self.wake(now + self._gap)
        return outputs

    def _take_turn(self) -> list[EngineOutput]:
        """Have the core plan, and process the oldest step if it has run."""
        self._client.wait(0.0)
        return [event for event in self._client.poll() if isinstance(event, EngineOutput)]

    def _start_step(self, now: float) -> bool:
        if self.step_ends is not None or not self._queue.plans:
            return False
        shape = shape_of(self._queue.plans[0])
        seconds = self._queue.seconds = self._clock.seconds(shape)
        self.step_ends = now + seconds
        self.num_tokens += shape.tokens
        self.busy_seconds += seconds
        return True
