"""Plans on their way through the runner: first in, first out, here or in a thread of its own.

    submit(plan) ─▶ [ plans ] ─▶ runner.execute ─▶ [ outcomes ] ─▶ wait() ─▶ Finished
                                                                   forget(n): the oldest n leave

With `InlinePlanQueue` a plan runs in the caller's thread when its result is waited for. With
`ThreadedPlanQueue` it runs at once beside the caller, who plans the next step meanwhile.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from girih.runtime.records.plans import ModelRunner, ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class Finished:
    """A plan that ran.

    Attributes:
        result: the runner's answer.
        started: when the runner took it up (`time.monotonic`).
        ended: when it was done.
    """

    result: ModelRunnerOutput
    started: float
    ended: float


T = TypeVar("T")


class PlanQueue(Protocol):
    """Hands plans to a runner in order and their outcomes back in the same order."""

    def submit(self, plan: SchedulerOutput) -> None:
        """Queue a plan behind those submitted before."""
        ...

    def has_result(self) -> bool:
        """Return whether `wait` would return without waiting for another thread."""
        ...

    def wait(self) -> Finished:
        """Wait for the outcome of the oldest plan, which stays the oldest one.

        Raises:
            BaseException: whatever the runner raised.
        """
        ...

    def forget(self, num_plans: int) -> None:
        """Let the oldest `num_plans` plans leave; outcomes still to come are dropped unseen."""
        ...

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do `work` where plans run, after those submitted so far; what comes of it."""
        ...

    def close(self) -> None:
        """End the thread, if there is one, after the plans submitted so far."""
        ...


def call_now(work: Callable[[], T]) -> Future[T]:
    """Do `work` and return what came of it."""
    done: Future[T] = Future()
    _settle(done, work)
    return done


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # raised again where the result is waited for
        done.set_exception(error)


class InlinePlanQueue:
    """Runs each plan in `wait`.

    Args:
        runner: computes the plans.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plans: deque[SchedulerOutput] = deque()

    def submit(self, plan: SchedulerOutput) -> None:
        """See `PlanQueue.submit`."""
        self._plans.append(plan)

    def has_result(self) -> bool:
        """See `PlanQueue.has_result`."""
        return bool(self._plans)

    def wait(self) -> Finished:
        """See `PlanQueue.wait`."""
        started = time.monotonic()
        result = self._runner.execute(self._plans[0])
        return Finished(result, started, time.monotonic())

    def forget(self, num_plans: int) -> None:
        """See `PlanQueue.forget`."""
        for _ in range(num_plans):
            self._plans.popleft()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """See `PlanQueue.call`."""
        return call_now(work)

    def close(self) -> None:
        """See `PlanQueue.close`."""


class ThreadedPlanQueue:
    """Runs plans in a thread of its own as soon as they are submitted.

    Plans that were submitted before a failure was forgotten are skipped: they build on it.

    Args:
        runner: computes the plans; only this queue's thread calls it.
        on_result: called in that thread after each plan; must not block.
    """

    def __init__(self, runner: ModelRunner, on_result: Callable[[], None] = lambda: None) -> None:
        self.on_result = on_result
        self._runner = runner
        self._plans: queue.SimpleQueue[tuple[int, SchedulerOutput] | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._generation = 0  # grows when a failure is forgotten
        self._outcomes: queue.SimpleQueue[Finished | BaseException] = queue.SimpleQueue()
        self._oldest: Finished | BaseException | None = None
        self._num_forgotten = 0  # of the outcomes to come
        self._thread: threading.Thread | None = None

    def submit(self, plan: SchedulerOutput) -> None:
        """See `PlanQueue.submit`."""
        self._start()
        self._plans.put((self._generation, plan))

    def has_result(self) -> bool:
        """See `PlanQueue.has_result`."""
        while self._num_forgotten and not self._outcomes.empty():
            self._outcomes.get()
            self._num_forgotten -= 1
        return self._oldest is not None or not self._outcomes.empty()

    def wait(self) -> Finished:
        """See `PlanQueue.wait`."""
        while self._num_forgotten:
            self._outcomes.get()
            self._num_forgotten -= 1
        if self._oldest is None:
            self._oldest = self._outcomes.get()
        if isinstance(self._oldest, BaseException):
            raise self._oldest
        return self._oldest

    def forget(self, num_plans: int) -> None:
        """See `PlanQueue.forget`."""
        if self._oldest is not None and num_plans:
            self._generation += isinstance(self._oldest, BaseException)
            self._oldest = None
            num_plans -= 1
        self._generation += num_plans > 0  # one of them may fail unseen
        self._num_forgotten += num_plans

    def call(self, work: Callable[[], T]) -> Future[T]:
        """See `PlanQueue.call`."""
        self._start()
        done: Future[T] = Future()
        self._plans.put(lambda: _settle(done, work))
        return done

    def close(self) -> None:
        """See `PlanQueue.close`."""
        if self._thread is not None:
            self._plans.put(None)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def _start(self) -> None:
        if self._thread is None:  # a core that is only looked at has no thread
            self._thread = threading.Thread(target=self._run, name="girih-runner", daemon=True)
            self._thread.start()
            # A step that ran into the interpreter's end would bring the process down in C++.
            atexit.register(self.close)

    def _run(self) -> None:
        failure: tuple[int, BaseException] | None = None
        while (entry := self._plans.get()) is not None:
            if not isinstance(entry, tuple):
                entry()
                continue
            generation, plan = entry
            started = time.monotonic()
            outcome: Finished | BaseException
            if failure is not None and failure[0] == generation:
                outcome = failure[1]
            else:
                try:
                    outcome = Finished(self._runner.execute(plan), started, time.monotonic())
                except BaseException as error:  # raised again where the result is waited for
                    failure, outcome = (generation, error), error
            self._outcomes.put(outcome)
            self.on_result()
