"""How the event loop reaches an engine core: in a thread of this process, or in another process.

    AsyncEngine ── add / abort / call ─▶ ThreadLink ─▶ EngineThread ─▶ core
                ◀─ CoreListener ──────   ProcessLink ─▶ CoreConnection ─▶ (ZMQ) ─▶ core's process

A link is used on one event loop only and calls its listener there.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, Protocol

from girih.kernels.base.errors import EngineError
from girih.runtime.records.messages import Answer, Call
from girih.runtime.records.request import EngineRequest
from girih.serve.engine.engine_thread import Record


class CoreListener(Protocol):
    """Who hears what a core says."""

    def on_records(self, records: list[Record]) -> None:
        """Admissions and outputs, in the order the core made them."""

    def on_lost(self) -> None:
        """The core's process is gone; another one may come (`on_back`)."""

    def on_back(self) -> None:
        """A new core takes requests; it knows nothing of the old ones."""

    def on_death(self, error: BaseException) -> None:
        """The core is gone for good."""


class CoreLink(Protocol):
    """What `AsyncEngine` needs of a core."""

    @property
    def error(self) -> BaseException | None:
        """Why the core is gone for good; None while it is not."""

    def start(self, listener: CoreListener) -> None:
        """Begin to report to `listener`."""

    def add(self, request: EngineRequest) -> None:
        """Hand a request over; an `Admission` answers it.

        Raises:
            EngineError: the core is not there.
        """

    def abort(self, request_ids: list[str]) -> None:
        """Have requests dropped; nothing answers."""

    async def call(self, method: str, **arguments: Any) -> Any:
        """Have the core do something (see `runtime/client/control.py`).

        Raises:
            GirihError: it refused, failed, or is not there.
        """

    def seconds_stuck(self) -> float:
        """How long the core has been busy with one step, or silent."""

    def close(self) -> None:
        """Stop reporting and let go of the core."""


class PendingCalls:
    """Calls whose answer has not come."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)

    def new(self, method: str, arguments: dict[str, Any]) -> tuple[Call, asyncio.Future[Any]]:
        """Return a call to send and the future of its answer."""
        call = Call(next(self._numbers), method, arguments)
        future = asyncio.get_running_loop().create_future()
        self._futures[call.call_id] = future
        future.add_done_callback(lambda _: self._futures.pop(call.call_id, None))
        return call, future

    def settle(self, answer: Answer) -> None:
        """Give an answer to whoever waits for it."""
        future = self._futures.get(answer.call_id)
        if future is None or future.done():
            return
        if answer.refusal is None:
            future.set_result(answer.value)
        else:
            future.set_exception(answer.refusal.as_error())

    def fail_all(self, reason: str) -> None:
        """Tell everybody who waits that no answer will come."""
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(EngineError(reason))
