"""An engine core in a thread of this process, reached from the event loop.

event loop ── send ─▶ EngineThread's mailbox
event loop ◀─ call_soon_threadsafe ── records of a step, gathered while the loop is busy
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import AddRequest, Answer
from girih.runtime.records.request import EngineRequest
from girih.serve.engine.core_link import CoreListener, PendingCalls
from girih.serve.engine.engine_thread import EngineThread, Record


class ThreadLink:
    """A core in a thread of this process.

    Args:
        core: the engine core; this object's thread owns it from `start` on.
    """

    def __init__(self, core: EngineCore) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(core, self._post, self._post_death)
        self._calls = PendingCalls()
        self._pending: list[Record] = []
        self._pending_lock = threading.Lock()
        self._listener: CoreListener | None = None

    @property
    def error(self) -> BaseException | None:
        """See `CoreLink.error`."""
        return self._thread.error

    def start(self, listener: CoreListener) -> None:
        """See `CoreLink.start`."""
        self._listener = listener
        self._thread.start()

    def add(self, request: EngineRequest) -> None:
        """See `CoreLink.add`."""
        self._thread.send(AddRequest(request))

    def abort(self, request_ids: list[str]) -> None:
        """See `CoreLink.abort`."""
        self._thread.abort(request_ids)

    async def call(self, method: str, **arguments: Any) -> Any:
        """See `CoreLink.call`."""
        call, answer = self._calls.new(method, arguments)
        self._thread.send(call)
        return await answer

    def seconds_stuck(self) -> float:
        """See `CoreLink.seconds_stuck`."""
        return self._thread.seconds_in_step()

    def close(self) -> None:
        """See `CoreLink.close`."""
        self._thread.close()
        self._calls.fail_all("the engine is shutting down")

    def _post(self, records: list[Record]) -> None:
        """Called in the engine thread."""
        with self._pending_lock:
            is_scheduled = bool(self._pending)
            self._pending.extend(records)
        if not is_scheduled:
            self._call_loop(self._deliver)

    def _post_death(self, error: BaseException) -> None:
        """Called in the engine thread."""
        self._call_loop(lambda: self._die(error))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        # A closed loop has no readers left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _deliver(self) -> None:
        with self._pending_lock:
            records, self._pending = self._pending, []
        for record in records:
            if isinstance(record, Answer):
                self._calls.settle(record)
        assert self._listener is not None
        self._listener.on_records([r for r in records if not isinstance(r, Answer)])

    def _die(self, error: BaseException) -> None:
        self._calls.fail_all(f"the engine died: {error}")
        assert self._listener is not None
        self._listener.on_death(error)
