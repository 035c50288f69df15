"""Runs an engine core in its own thread; only msgspec records go in and out.

any thread ── add / abort / call ─▶ mailbox ─▶ [ core.step() ... ] ─▶ on_records(records)
                                    (bounded)   sleeps when idle      on_death(error)
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from girih.kernels.base.errors import EngineError
from girih.runtime.client.core_service import admit, answer_call
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import AbortRequests, AddRequest, Admission, Answer, Call
from girih.runtime.records.request import EngineOutput

MAILBOX_LIMIT = 65536
CHORE_SECONDS = 0.5  # between looks of an idle core at its chore

Record = Admission | Answer | EngineOutput


class EngineThread:
    """Owns the core: nobody else may call it while the thread runs.

    Args:
        core: the engine core.
        on_records: called in this thread with the records of each step; must not block.
        on_death: called once, in this thread, when the core raised.
    """

    def __init__(
        self,
        core: EngineCore,
        on_records: Callable[[list[Record]], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._core = core
        self._on_records = on_records
        self._on_death = on_death
        self._mailbox: deque[AddRequest | AbortRequests | Call] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._step_started: float | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="girih-engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def send(self, command: AddRequest | Call) -> None:
        """Hand a request or a call over.

        Raises:
            EngineError: the engine died, is closing, or cannot keep up with its mailbox.
        """
        self._send(command, MAILBOX_LIMIT)

    def abort(self, request_ids: list[str]) -> None:
        """Ask to drop requests; takes effect before the next step."""
        if self.error is None and not self._closing:
            self._send(AbortRequests(request_ids), None)

    def close(self, timeout: float = 5.0) -> None:
        """Stop after the running step and wait for it."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def seconds_in_step(self) -> float:
        """How long the running step has taken so far; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def _send(self, command: AddRequest | AbortRequests | Call, limit: int | None) -> None:
        with self._wake:
            if self.error is not None:
                raise EngineError(f"the engine died: {self.error}")
            if self._closing:
                raise EngineError("the engine is shutting down")
            if limit is not None and len(self._mailbox) >= limit:
                raise EngineError(
                    f"{limit} requests already wait to be handed to the engine; try again later"
                )
            self._mailbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._serve_once():
                pass
        except BaseException as error:  # whatever kills the core must reach every reader
            with self._wake:
                self.error = error
            self._on_death(error)

    def _serve_once(self) -> bool:
        with self._wake:
            while not (self._mailbox or self._closing or self._core.has_work()):
                if not self._wake.wait(self._idle_seconds()):
                    break
            if self._closing:
                return False
            commands = list(self._mailbox)
            self._mailbox.clear()
        for command in commands:
            self._handle(command)
        if not commands and not self._core.has_work():
            self._core.plan_ahead()  # nothing to plan: its chore
        if self._core.has_work():
            self._step_started = time.monotonic()
            outputs = self._core.step()
            self._step_started = None
            if outputs:
                self._on_records(list(outputs))
            if self._core.failure is not None:
                raise EngineError(self._core.failure)
        return True

    def _idle_seconds(self) -> float | None:
        return None if self._core.chore is None else CHORE_SECONDS

    def _handle(self, command: AddRequest | AbortRequests | Call) -> None:
        if isinstance(command, AbortRequests):
            self._core.abort(command.request_ids)
        elif isinstance(command, AddRequest):
            self._on_records([admit(self._core, command.request)])
        else:
            answer = answer_call(self._core, command)
            self._on_records([*self._core.take_outputs(), answer])
