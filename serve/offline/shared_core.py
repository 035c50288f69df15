"""One engine core that several batches of a program use at once, from any thread.

    batch A ─ submit, wait ─╮                          ╭─▶ A's outputs
    batch B ─ submit, wait ─┴─▶ core.step() (locked) ──┴─▶ B's outputs, kept until B asks

There is no thread of its own: whoever waits makes the next step, for everybody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from girih.kernels.base.errors import EngineError
from girih.runtime.engine.core import EngineStats
from girih.runtime.records.request import EngineOutput, EngineRequest

T = TypeVar("T")


class StepwiseCore(Protocol):
    """What this module needs of an engine core, in this process or in another."""

    def add_requests(self, requests: Sequence[EngineRequest]) -> None:
        """Queue requests before the next step; raises when one is refused."""

    def abort(self, request_ids: list[str]) -> object:
        """Drop requests."""

    def has_work(self) -> bool:
        """Whether a step would bring something."""

    def step(self) -> list[EngineOutput]:
        """Make or await a step."""

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

    def stats(self) -> EngineStats:
        """Counters up to now."""

    def close(self) -> None:
        """End it."""


class SharedCore:
    """Steps a core for whoever waits, and hands each batch its own outputs.

    Args:
        core: the engine core; only this object calls it once batches run.
    """

    def __init__(self, core: StepwiseCore) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._outputs: dict[str, deque[EngineOutput]] = {}  # request id -> its batch's
        self._dropped: deque[str] = deque()  # to abort before the core is asked for anything
        self._is_closed = False

    def submit(self, requests: Sequence[EngineRequest]) -> deque[EngineOutput]:
        """Queue the requests of one batch; returns where their outputs will be (see `wait`).

        Raises:
            GirihError: one is refused, or the engine died or is closed; none of them runs then.
        """
        outputs: deque[EngineOutput] = deque()
        ids = [request.request_id for request in requests]
        try:
            with self._lock:
                self._prepare()
                self._outputs.update(dict.fromkeys(ids, outputs))
                self._core.add_requests(requests)
        except BaseException:
            self.abort(ids)
            raise
        return outputs

    def wait(self, outputs: deque[EngineOutput]) -> list[EngineOutput]:
        """Return the news of a batch, after one more step of the core if there are none.

        Args:
            outputs: what `submit` returned for it.

        Returns:
            At least one record, or none when the step was about other batches only.

        Raises:
            EngineError: the engine died, is closed, or has nothing to do.
        """
        with self._lock:
            self._prepare()
            if not outputs:
                if not self._core.has_work():
                    raise EngineError(
                        "the engine has nothing to do, but a request of this batch has not ended"
                    )
                for output in self._core.step():
                    self._deliver(output)
            news = list(outputs)
            outputs.clear()
            return news

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests before the next step; never waits for another thread.

        So it may be called while this very thread makes a step: by a generator that is collected.
        """
        self._dropped.extend(request_ids)
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def call(self, work: Callable[[], T]) -> T:
        """Do `work` with the core between two steps.

        Raises:
            EngineError: the engine is closed; and whatever `work` raises.
        """
        with self._lock:
            self._prepare()
            return work()

    def close(self) -> None:
        """End the core; whoever waits for outputs gets an error. Closing twice does no harm."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._core.close()

    def _prepare(self) -> None:
        """Before the core is asked for anything; the lock is held."""
        if self._is_closed:
            raise EngineError("the engine was closed; make a new LLM")
        self._drop()

    def _drop(self) -> None:
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        running = [i for i in dropped if self._outputs.pop(i, None) is not None]
        if running and not self._is_closed:
            self._core.abort(running)

    def _deliver(self, output: EngineOutput) -> None:
        ended = output.finish_reason is not None
        find = self._outputs.pop if ended else self._outputs.get
        found = find(output.request_id, None)
        if found is not None:  # else it was aborted as this step ran
            found.append(output)
