"""The engine core: requests in, one step at a time, outputs out.

    add_request ─▶ Scheduler.schedule ─▶ PlanQueue ─▶ Scheduler.update ─▶ EngineOutput
                                         (runner)

`step` = `plan_ahead` + `process_outputs`. With asynchronous scheduling two plans are in flight:
while the runner's thread runs one, the caller processes the previous one's outputs and plans the
next. The tokens are the same: a plan only says which positions to compute, and the runner knows
what it sampled.

One thread owns a core; nothing here locks. What is the fault of one request ends that one alone
(`isolation.py`); observers that fail are not missed. What happens when the runner raises:
- an ordinary exception ends the requests of that plan with finish reason "error" (their blocks
  are freed, waiting requests go on; requests of plans made later are computed anew);
- `EngineError`, or MAX_FAILURES_IN_A_ROW failed steps, ends the core: every request gets an
  "error" output from that `step`, later calls raise `EngineError`;
- `KeyboardInterrupt` and the like are passed on; the plans in flight are taken back first and
  their requests will be computed anew, so the core stays usable.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, TypeVar

import msgspec

from girih.kernels.base.errors import EngineError
from girih.runtime.engine.observers import CoreObserver, StepReport
from girih.runtime.engine.operations import Operations, OperationState
from girih.runtime.engine.plan_queue import Finished, InlinePlanQueue, PlanQueue, ThreadedPlanQueue
from girih.runtime.isolation import describe, each
from girih.runtime.records.plans import ModelRunner, SchedulerOutput
from girih.runtime.records.request import EngineOutput, EngineRequest
from girih.runtime.schedule.kv_cache import KVCacheStats
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.step.buckets import ReplayStats

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from girih.runtime.observe.profiler import StepProfiler

T = TypeVar("T")

MAX_FAILURES_IN_A_ROW = 3
ALIVE_SECONDS = 1.0  # between signs of life while the runner does something else than steps
BLOCKED_SECONDS = 0.01  # a step without a plan waits so long for what requests are blocked on
PLANS_IN_FLIGHT = 2  # with asynchronous scheduling: one that runs, one behind it


class CompileState(msgspec.Struct, frozen=True):
    """Progress of compiling beside a serving engine.

    Attributes:
        phase: "compiling", "checking" (the canary runs), "done", or "failed": eager pieces answer
            where no compiled tile was taken in, or everywhere when the canary failed.
        tiles: compiled tiles that the engine runs.
        total_tiles: distinct tiles of the model.
        seconds: since the build began; until its end once it is over.
        detail: why it failed, or how the canary went.
    """

    phase: str
    tiles: int
    total_tiles: int
    seconds: float
    detail: str = ""


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start, and the state now.

    Attributes:
        num_running: requests that hold blocks.
        num_waiting: requests in the queue.
        is_paused: nothing is planned until the engine is resumed.
        num_steps: steps that ran.
        num_failed_steps: steps whose runner raised.
        num_preemptions: how often a request lost its blocks.
        num_prompt_tokens: prompt tokens of admitted requests.
        num_generated_tokens: output tokens.
        finished: finish reason -> requests.
        schedule_seconds: time spent making plans.
        run_seconds: time spent in the runner.
        update_seconds: time spent processing outputs.
        kv_cache: the KV cache's counters.
        operation: whether it sleeps, or will when its requests have ended.
        recompiles: tiles this process compiled after the engine was ready; serving never does.
        compiling: of a build behind the serving engine, None when there was none.
        replay: which steps ran as captured; None when the runner captures none.
    """

    num_running: int
    num_waiting: int
    is_paused: bool
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
    operation: OperationState = OperationState()
    recompiles: int = 0
    compiling: CompileState | None = None
    replay: ReplayStats | None = None


class EngineCore:
    """Runs requests to their end.

    Args:
        scheduler: owns the requests.
        runner: computes the plans.
        async_scheduling: let the runner work in its own thread and plan one step ahead.
        queue: how plans reach the runner; None makes what `async_scheduling` asks for.

    Attributes:
        is_async: whether a step runs beside the caller, who plans the next one.
        failure: why the core died, or None while it lives.
        observers: told what the core does.
        closers: called when the core is closed.
        operations: sleep, wake and new weights.
        profiler: records steps on request, if it may.
        request_checks: called with each request before it is taken in; they may raise.
        idle_hook: called with the core before it plans, about once a second while it is idle.
        compile_state: tells how far a build behind the serving engine is.
        sign_of_life: called about once a second while the core waits for something long.
        count_recompiles: tells how many tiles were compiled since the engine was ready.
        replay_stats: tells which steps ran as captured.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        async_scheduling: bool = False,
        queue: PlanQueue | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.is_async = async_scheduling
        self.failure: str | None = None
        self.observers: list[CoreObserver] = []
        self.closers: list[Callable[[], None]] = []
        self.operations = Operations(self)
        self._late_outputs: list[EngineOutput] = []
        self.profiler: StepProfiler | None = None
        self.request_checks: list[Callable[[EngineRequest], None]] = []
        self.idle_hook: Callable[[EngineCore], None] | None = None
        self.compile_state: Callable[[], CompileState] | None = None
        self.sign_of_life: Callable[[], object] = lambda: None
        self.count_recompiles: Callable[[], int] = lambda: 0
        self.replay_stats: Callable[[], ReplayStats | None] = lambda: None
        if queue is None:
            queue = ThreadedPlanQueue(runner) if async_scheduling else InlinePlanQueue(runner)
        self._queue: PlanQueue = queue
        self._is_paused = False
        self._max_in_flight = PLANS_IN_FLIGHT if async_scheduling else 1
        self._planned: deque[SchedulerOutput] = deque()
        self._plan_times: deque[tuple[float, float]] = deque()  # begun and made, per plan
        self._oldest_since = 0.0  # when the oldest plan became the oldest
        self._observer_faults: set[tuple[str, str]] = set()
        self._num_steps = 0
        self._num_failed_steps = 0
        self._failures_in_a_row = 0
        self._seconds = [0.0, 0.0, 0.0]  # schedule, run, update

    @property
    def is_running(self) -> bool:
        """True if plans are in flight."""
        return bool(self._planned)

    @property
    def is_paused(self) -> bool:
        """True if nothing is planned until `resume`."""
        return self._is_paused

    @property
    def has_requests(self) -> bool:
        """True if any request is unfinished."""
        return self.scheduler.has_work()

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never be served as it stands.
            QueueFullError: too many requests wait.
            UnavailableError: the core sleeps, or will soon.
            EngineError: the core died.
        """
        self._check_alive()
        self.operations.check_open()
        for check in self.request_checks:
            check(request)
        self.scheduler.add_request(request)
        self._tell(lambda observer: observer.on_request(request))

    def add_requests(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests in order, up to the first that is refused.

        Raises:
            As `add_request`.
        """
        for request in requests:
            self.add_request(request)

    def abort(self, request_ids: list[str]) -> list[EngineOutput]:
        """End requests now and free their blocks; unknown ids are ignored.

        Returns:
            One record with finish reason "abort" for each that was unfinished.
        """
        return self._end(request_ids, "abort")

    def abort_all(self) -> None:
        """End every request; `take_outputs` has the records for whoever waits for them."""
        self._late_outputs += self._end(list(self.scheduler.requests), "abort")

    def take_outputs(self) -> list[EngineOutput]:
        """Return the records of requests that ended by what was asked of the core."""
        outputs, self._late_outputs = self._late_outputs, []
        return outputs

    def call_runner(self, work: Callable[[], T]) -> T:
        """Do `work` where steps run, behind the plans in flight, and wait for it."""
        done = self._queue.call(work)
        while True:
            try:
                return done.result(ALIVE_SECONDS)
            except FutureTimeout:
                if done.done():  # it was `work` that timed out
                    raise
                self.sign_of_life()

    def has_work(self) -> bool:
        """Return whether a `step` has work: plans in flight or unfinished requests."""
        if self._planned:
            return True
        if self.scheduler.has_work():
            return not self._is_paused
        return self.operations.is_pending

    def step(self) -> list[EngineOutput]:
        """Plan what can be planned, then wait for the oldest plan and process its outputs.

        Returns:
            One record per request that got tokens or ended; empty without work.

        Raises:
            EngineError: the core died in an earlier step.
        """
        self._check_alive()
        if self.plan_ahead():
            return self.process_outputs()
        if self.scheduler.blocked:  # nothing else to do: do not spin
            self.scheduler.pending_grammars.wait(BLOCKED_SECONDS)
        return []

    def plan_ahead(self) -> bool:
        """Make plans until as many are in flight as may be; whether any is."""
        if self.idle_hook is not None:
            self.idle_hook(self)
        if self.operations.is_pending:
            self.operations.advance()
        while len(self._planned) < self._max_in_flight and not self._is_paused:
            begun = time.monotonic()
            plan = self.scheduler.schedule()
            made = time.monotonic()
            self._seconds[0] += made - begun
            if plan is None:
                break
            if not self._planned:
                self._oldest_since = made
            self._planned.append(plan)
            self._plan_times.append((begun, made))
            self._queue.submit(plan)
        return bool(self._planned)

    def has_result(self) -> bool:
        """Return whether `process_outputs` would not wait for the runner's thread."""
        return self._queue.has_result()

    def seconds_in_step(self) -> float:
        """Return the seconds of the running step so far; 0 when none is planned."""
        return time.monotonic() - self._oldest_since if self._planned else 0.0

    def on_result(self, callback: Callable[[], None]) -> None:
        """Have `callback` called, in another thread, whenever there is something to do.

        That is when a plan has run in the runner's thread, and when a blocked request may go on.
        """
        self.scheduler.pending_grammars.on_ready(callback)
        if isinstance(self._queue, ThreadedPlanQueue):
            self._queue.on_result = callback

    def process_outputs(self) -> list[EngineOutput]:
        """Wait for the oldest plan in flight (there must be one) and take in its result.

        Returns:
            As `step`.
        """
        try:
            finished = self._queue.wait()
            received = time.monotonic()
            outputs = self.scheduler.update(finished.result)
        except Exception as error:
            return self._fail(error)
        except BaseException:
            self.scheduler.preempt_requests(self._void_plans())
            raise
        self._note_step(finished, received, outputs)
        return outputs

    def close(self) -> None:
        """End the runner's thread; the core is not used afterwards."""
        for close in self.closers:
            close()
        self._queue.close()
        self.close_observers()

    def close_observers(self) -> None:
        """Tell the observers that nothing more will come."""
        self._tell(lambda observer: observer.close())
        self.observers.clear()

    def pause(self) -> None:
        """Plan nothing more until `resume`; plans in flight come to their end."""
        self._is_paused = True

    def resume(self) -> None:
        """Plan again."""
        self._is_paused = False

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (for example after the weights changed)."""
        self.scheduler.kv_cache.reset_prefix_cache()

    def recompute(self) -> None:
        """Forget what the model computed: plans, KV and cached prefixes. Tokens given out stay."""
        if self._planned:
            self._void_plans()
        self.scheduler.preempt_requests([r.request_id for r in self.scheduler.running])
        self.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Counters up to now."""
        scheduler = self.scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            is_paused=self._is_paused,
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
            operation=self.operations.state,
            recompiles=self.count_recompiles(),
            compiling=self.compile_state() if self.compile_state is not None else None,
            replay=self.replay_stats(),
        )

    def check_integrity(self) -> None:
        """Raise `EngineError` when queues, requests and blocks disagree."""
        self.scheduler.check_integrity()

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise EngineError(f"the engine core died: {self.failure}")

    def _note_step(self, finished: Finished, received: float, outputs: list[EngineOutput]) -> None:
        """Let the oldest plan leave and account for it."""
        updated = time.monotonic()
        plan, (begun, made) = self._planned.popleft(), self._plan_times.popleft()
        self._queue.forget(1)
        self._oldest_since = updated
        run_seconds = finished.ended - finished.started
        self.scheduler.learn_step_time(plan, run_seconds)
        self._seconds[1] += run_seconds
        self._seconds[2] += updated - received
        self._num_steps += 1
        self._failures_in_a_row = 0
        if self.observers:
            runner = (finished.started, finished.ended)
            times, how = finished.result.times, finished.result.dispatch
            report = StepReport(plan, outputs, begun, made, *runner, received, updated, times, how)
            self._tell(lambda observer: observer.on_step(report))

    def _end(
        self, request_ids: list[str], reason: str, error: str | None = None
    ) -> list[EngineOutput]:
        outputs = self.scheduler.finish_requests(request_ids, reason, error=error)
        self._tell(lambda observer: observer.on_end(outputs))
        return outputs

    def _tell(self, news: Callable[[CoreObserver], object]) -> None:
        """Tell the observers; what one of them raises is none of the requests' business."""
        each(self.observers, news, self._note_observer)

    def _note_observer(self, observer: CoreObserver, error: Exception) -> None:
        fault = (type(observer).__name__, describe(error))
        if fault not in self._observer_faults:  # said once, not at every step
            self._observer_faults.add(fault)
            logger.error("%s missed news of the core: %s", *fault, exc_info=error)

    def _void_plans(self) -> list[str]:
        """Take back every plan in flight; returns the requests they would have advanced."""
        affected = self.scheduler.roll_back(self._planned[0].step_id)
        self._queue.forget(len(self._planned))
        self._planned.clear()
        self._plan_times.clear()
        return affected

    def _fail(self, error: Exception) -> list[EngineOutput]:
        """End what the oldest plan ran, or everything when the core cannot go on."""
        plan = self._planned[0]
        logger.error("step %d failed", plan.step_id, exc_info=error)
        self._num_failed_steps += 1
        self._failures_in_a_row += 1
        text = describe(error)
        affected = self._void_plans()
        failed = list(plan.num_scheduled_tokens)
        if isinstance(error, EngineError) or self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
            self.failure = text
            failed = list(self.scheduler.requests)
        outputs = self._end(failed, "error", text)
        # The runner may have got ahead with plans that are void now: it starts these anew.
        unharmed = [i for i in affected if i in self.scheduler.requests]
        self.scheduler.preempt_requests(unharmed)
        return outputs
