"""Operations during which a core takes no requests: sleep, wake, new weights.

    sleep, reload_weights ─▶ is anything unfinished? ─ no ──────────────▶ done at once
                                    │ mode=refuse: BusyError
                                    │ mode=abort: everything ends, then done
                                    ╰ mode=wait: new requests are refused, done when the last ends

Such work is done in the runner's thread, behind the steps that were planned, while no plan is in
flight. A core that sleeps refuses requests until it is woken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from girih.kernels.base.errors import BusyError, GirihError, RequestError, UnavailableError
from girih.runtime.records.plans import MemoryRunner

if TYPE_CHECKING:
    from girih.runtime.engine.core import EngineCore

logger = logging.getLogger(__name__)

MODES = ("refuse", "abort", "wait")
LEVELS = (1, 2)


class OperationState(msgspec.Struct, frozen=True):
    """The operation that an operator requested.

    Attributes:
        sleep_level: 0 awake; 1 without weights and KV; 2 without compiled code too.
        pending: what will be done when the last request ended, or None.
        error: why the last thing that was waited for failed, or None.
    """

    sleep_level: int = 0
    pending: str | None = None
    error: str | None = None


class Operations:
    """Puts a core to sleep, wakes it, exchanges its weights.

    Args:
        core: the engine core; its thread calls this object.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._level = 0
        self._pending: tuple[str, Callable[[], None]] | None = None
        self._error: str | None = None

    @property
    def state(self) -> OperationState:
        """The current state."""
        pending = self._pending[0] if self._pending is not None else None
        return OperationState(self._level, pending, self._error)

    @property
    def is_pending(self) -> bool:
        """True if something will be done when the last request ended."""
        return self._pending is not None

    def check_open(self) -> None:
        """Raise `UnavailableError` while no requests are taken."""
        if self._pending is not None:
            raise UnavailableError(
                f"the engine takes no requests: {self._pending[0]} follows when the running ones "
                "have ended; try again later"
            )
        if self._level:
            raise UnavailableError(
                f"the engine is asleep (level {self._level}); POST /admin/wake or LLM.wake() "
                "wakes it"
            )

    def sleep(self, level: int = 1, mode: str = "refuse") -> OperationState:
        """Give up memory until `wake`: weights and KV cache, at level 2 compiled code as well.

        Cached prefixes are forgotten. A deeper sleep is not made lighter.

        Raises:
            RequestError: no such level or mode.
            BusyError: requests are unfinished and the mode is "refuse", compiled code is still
                being taken in, or new weights wait for requests to end.
        """
        if level not in LEVELS:
            raise RequestError(f"level is {level!r}; it is 1 (weights and KV) or 2", "level")
        runner = self._runner()

        def fall_asleep() -> None:
            if level > self._level:
                self._core.reset_prefix_cache()
                self._core.call_runner(lambda: runner.sleep(level))
                self._level = level
                logger.info("asleep, level %d", level)

        return self._when_idle(f"sleep (level {level})", mode, fall_asleep)

    def wake(self) -> OperationState:
        """Take memory back; a sleep that waits for requests is called off.

        Raises:
            GirihError: the weights or the code cannot be loaded; the core sleeps on.
        """
        if self._pending is not None and self._pending[0].startswith("sleep"):
            self._pending = None
        if self._level:
            self._core.call_runner(self._runner().wake)
            self._level = 0
            logger.info("awake")
        return self.state

    def reload_weights(self, path: str | None = None, mode: str = "refuse") -> OperationState:
        """Load other weights of the same model; cached prefixes are forgotten.

        Args:
            path: a model source; None reads the present one again.
            mode: see `sleep`.

        Raises:
            RequestError: they are of another model, or cannot be read; the old ones serve on.
            BusyError: as `sleep`; also while the core sleeps, or is about to.
            BundleError: the canary failed with them; the old ones serve on.
        """
        if self._level:
            raise BusyError(f"the engine is asleep (level {self._level}); wake it first")
        runner = self._runner()

        def exchange() -> None:
            note = self._core.call_runner(lambda: runner.reload_weights(path))
            self._core.reset_prefix_cache()
            logger.info("new weights: %s", note)

        return self._when_idle("loading weights", mode, exchange)

    def advance(self) -> None:
        """Do what is pending if nothing is unfinished any more."""
        if self._pending is None or self._core.has_requests:
            return
        (name, work), self._pending = self._pending, None
        try:
            self._settle(work)
        except Exception as error:
            is_own = isinstance(error, GirihError)
            logger.error("%s failed: %s", name, error, exc_info=None if is_own else error)
            self._error = str(error) if is_own else f"{type(error).__name__}: {error}"

    def _runner(self) -> MemoryRunner:
        runner = self._core.runner
        if not isinstance(runner, MemoryRunner):
            raise RequestError("this engine's runner keeps its memory: it has no sleep and wake")
        return runner

    def _when_idle(self, name: str, mode: str, work: Callable[[], None]) -> OperationState:
        if mode not in MODES:
            raise RequestError(f"mode is {mode!r}; it is one of {', '.join(MODES)}", "mode")
        self._check_pending(name)
        self._error = None
        core = self._core
        if core.has_requests and mode == "refuse":
            raise BusyError(
                f"{len(core.scheduler.requests)} requests are unfinished; mode=wait lets them end "
                "first, mode=abort ends them"
            )
        if core.has_requests and mode == "wait":
            if core.is_paused:
                raise BusyError("the engine is paused, so its requests never end; resume it first")
            self._pending = (name, work)
            return self.state
        self._pending = None
        core.abort_all()
        self._settle(work)
        return self.state

    def _check_pending(self, name: str) -> None:
        """Raise `BusyError` when something of another kind waits for requests to end."""
        waits = self._pending[0] if self._pending is not None else name
        if waits.startswith("sleep") != name.startswith("sleep"):
            raise BusyError(
                f"{waits} follows when the running requests have ended; ask for {name} after that"
            )

    def _settle(self, work: Callable[[], None]) -> None:
        """Let plans in flight, which concern nobody any more, come to their end; then work."""
        while self._core.is_running:
            self._core.process_outputs()
        work()
