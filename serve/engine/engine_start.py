"""Ways to come by a ready engine, beside a running event loop.

InlineStart    builds it in a thread of this process
ProcessStart   starts a core's process, which builds it
SharedStart    waits for a core that somebody else started
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from girih.kernels.base.progress import Progress
from girih.runtime.client.core_process import Build, BuiltEngine, CoreSupervisor
from girih.runtime.client.core_spawn import SpawnedCore
from girih.runtime.records.messages import EngineFacts
from girih.serve.engine.core_link import CoreLink
from girih.serve.engine.process_link import ProcessLink
from girih.serve.engine.thread_link import ThreadLink
from girih.serve.text.tokenizer import Tokenizer
from girih.serve.text.tokenizer_ahead import TokenizerAhead


@dataclass(frozen=True)
class Built:
    """What an `InlineStart` builds."""

    handle: BuiltEngine
    tokenizer: Tokenizer


@dataclass(frozen=True)
class StartedEngine:
    """An engine that takes requests.

    Attributes:
        link: reaches its core.
        facts: what it is.
        tokenizer: of its model.
    """

    link: CoreLink
    facts: EngineFacts
    tokenizer: Tokenizer


class EngineStart(Protocol):
    """One way; used once."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread of this process still builds (it cannot be interrupted)."""
        ...

    def begin(self) -> None:
        """Have as much happen as needs no event loop; `start` does it otherwise."""

    async def start(self, progress: Progress) -> StartedEngine:
        """Return the engine when it is ready.

        Args:
            progress: observer of the work; called on the loop or in another thread.

        Raises:
            GirihError: it could not be built.
        """
        ...

    def close(self) -> None:
        """End whatever this object started."""
        ...


class InlineStart:
    """Builds in a thread of this process.

    Args:
        build: makes the engine.
    """

    def __init__(self, build: Callable[[Progress], Built]) -> None:
        self._build = build
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """See `EngineStart.begin`."""

    @property
    def is_busy(self) -> bool:
        """See `EngineStart.is_busy`."""
        return self._thread is not None and self._thread.is_alive()

    async def start(self, progress: Progress) -> StartedEngine:
        """See `EngineStart.start`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Built] = loop.create_future()

        def settle(result: Built | BaseException) -> None:
            if done.cancelled():
                return
            if isinstance(result, BaseException):
                done.set_exception(result)
            else:
                done.set_result(result)

        def work() -> None:
            try:
                result: Built | BaseException = self._build(progress)
            except BaseException as error:  # raised again where the result is awaited
                result = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(settle, result)

        self._thread = threading.Thread(target=work, name="girih-build", daemon=True)
        self._thread.start()
        built = await done
        return StartedEngine(ThreadLink(built.handle.core), built.handle.facts, built.tokenizer)

    def close(self) -> None:
        """See `EngineStart.close`."""


class SharedStart:
    """Waits for a core in another process.

    Args:
        address: where it listens, or will.
        restarts: whether another core comes when it dies.
        tokenizer: instead of the model's own.
    """

    is_busy = False

    def __init__(
        self, address: str, restarts: bool = False, tokenizer: Tokenizer | None = None
    ) -> None:
        self._address = address
        self._restarts = restarts
        self._tokenizer = tokenizer
        self._link: ProcessLink | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """See `EngineStart.begin`."""

    async def start(self, progress: Progress) -> StartedEngine:
        """See `EngineStart.start`."""
        self._loop = asyncio.get_running_loop()
        ahead = TokenizerAhead(progress)
        on_progress = ahead.on_progress if self._tokenizer is None else progress
        self._link = link = ProcessLink(self._address, self._restarts, on_progress)
        if self._error is not None:  # it ended before there was a link to tell
            link.fail(self._error)
        try:
            facts = await link.ready()
            tokenizer = self._tokenizer
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(ahead.result, Path(facts.model_path))
            if link.error is not None:
                raise link.error
        except BaseException:
            link.close()
            raise
        return StartedEngine(link, facts, tokenizer)

    def fail(self, error: BaseException) -> None:
        """Take note that the core is gone for good (from any thread)."""
        self._error = error
        loop, link = self._loop, self._link
        if loop is not None and link is not None and not loop.is_closed():
            loop.call_soon_threadsafe(link.fail, error)

    def close(self) -> None:
        """See `EngineStart.close`."""


class ProcessStart:
    """Starts a core's process and waits for it.

    Args:
        build: makes the engine, there; it must be picklable.
        restarts: start another core when it dies.
        tokenizer: instead of the model's own.
        ahead: the process for the core, see `CoreSupervisor`.
    """

    is_busy = False

    def __init__(
        self,
        build: Build,
        restarts: bool = False,
        tokenizer: Tokenizer | None = None,
        ahead: SpawnedCore | None = None,
    ) -> None:
        self._has_begun = False
        self.supervisor = CoreSupervisor(build, restarts, self._on_end, ahead)
        self._shared = SharedStart(self.supervisor.address, restarts, tokenizer)

    def begin(self) -> None:
        """See `EngineStart.begin`."""
        if not self._has_begun:
            self._has_begun = True
            self.supervisor.start()

    async def start(self, progress: Progress) -> StartedEngine:
        """See `EngineStart.start`."""
        self.begin()
        return await self._shared.start(progress)

    def close(self) -> None:
        """See `EngineStart.close`."""
        self.supervisor.stop()

    def _on_end(self, error: BaseException) -> None:
        """Called in the supervisor's thread."""
        self._shared.fail(error)
