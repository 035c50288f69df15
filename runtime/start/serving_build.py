"""A build behind a serving engine, watched and checked (`compile.mode=background`).

    thread    trace ─ lower ─ (weights are read) ─ tiles … ─ seal ─ canary ─▶ done
    engine                     eager pieces ─ step ─ (parts taken in) ─ step ─ … ─ (eager pieces
                                                                        again, if it fails)

The canary runs in the build's thread, on executables of its own: no step waits for it. When the
compiled code answers something else, the engine goes back to eager pieces before its next step, and
what the wrong code computed is forgotten (`EngineCore.recompute`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch

from girih.graph.bundle.bundle import Bundle, BundleOrigin
from girih.graph.execute.executable import Executable
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.partition.partition import Program
from girih.graph.tiles.count import COMPILES
from girih.graph.tiles.inductor import TileFn
from girih.kernels.base.errors import BundleError, GirihError
from girih.kernels.base.progress import Progress
from girih.passes.build.background import BackgroundBuild, BuildObserver, Part
from girih.runtime.engine.core import CompileState, EngineCore

logger = logging.getLogger("girih.build")

# What a first request gets to be answered in before compilers take the cores.
FIRST_ANSWER_SECONDS = 2.0


class ServingBuild(BackgroundBuild):
    """A `BackgroundBuild` that says how far it is and whose result is checked.

    Args:
        build: see `BackgroundBuild`.
        progress: see `BackgroundBuild`.

    Attributes:
        is_over: nothing more will be taken in or given back.
        was_rejected: the canary failed, so that the eager pieces are back.
        canary: what the canary found, once it ran; None before.
        compiles_at_start: tiles this process had compiled before.
    """

    def __init__(
        self,
        build: Callable[[BuildObserver, Progress], tuple[Bundle, BundleOrigin]],
        progress: Progress,
    ) -> None:
        self.is_over = False
        self.was_rejected = False
        self.canary: VerifyResult | None = None
        self.compiles_at_start = COMPILES.total
        self._tiles_taken = 0
        self._begun = time.monotonic()
        self._ended: float | None = None
        self._pieces: dict[str, TileFn] = {}
        self._check: Callable[[Bundle], VerifyResult] | None = None
        self._built = threading.Event()
        self._serving = threading.Event()
        self._answered = threading.Event()
        self._has_stepped = False
        self._checked = threading.Event()
        super().__init__(build, progress)

    def serve(self, pieces: dict[str, TileFn], check: Callable[[Bundle], VerifyResult]) -> None:
        """Eager pieces begin to answer.

        Args:
            pieces: these, by tile key.
            check: runs the canary of a finished bundle; raises when the
                compiled code may not serve. Called in the build's thread.
        """
        self._pieces, self._check = dict(pieces), check
        self._serving.set()

    def state(self) -> CompileState:
        """Its progress."""
        seconds = (self._ended or time.monotonic()) - self._begun
        return CompileState(
            phase=self._phase(),
            tiles=self._tiles_taken,
            total_tiles=max(0, self.total - 1),
            seconds=round(seconds, 2),
            detail=str(self.error or (self.canary.as_text() if self.canary else "")),
        )

    def result(self) -> tuple[Bundle, BundleOrigin]:
        """See `BackgroundBuild.result`; does not wait for the canary."""
        self._built.wait()
        if self._result is not None:
            return self._result
        return super().result()

    def split(self, program: Program) -> None:
        """See `BuildObserver.split`; returns when compilers may start: eager pieces have answered
        a first request, or could have for a while.
        """
        super().split(program)
        self._serving.wait()
        self._answered.wait(FIRST_ANSWER_SECONDS)

    def before_step(self, executable: Executable) -> bool:
        """Called as each step begins; see `take_in`."""
        self._note_answer()
        self._has_stepped = True
        return self.take_in(executable)

    def take_in(self, executable: Executable) -> bool:
        """See `BackgroundBuild.take_in`; also gives back what the canary rejected."""
        if self.is_over:
            return False
        if not self.was_rejected:
            super().take_in(executable)
        if self.was_rejected:
            self._give_back(executable)
        elif not self._checked.is_set() or (self.error is None and self.taken < self.total):
            return True
        self._end()
        return False

    def tend(self, core: EngineCore, executable: Executable) -> None:
        """Do the build's share between steps, busy or idle (in the core's thread)."""
        if not core.is_running:
            self._note_answer()
            self.take_in(executable)
        if self.is_over:
            core.idle_hook = None
            if self.was_rejected:
                core.recompute()

    def cancel(self) -> None:
        """See `BackgroundBuild.cancel`; also lets the cache remove the bundle that was built."""
        self._serving.set()
        self._answered.set()
        super().cancel()
        if self._result is not None:
            self._result[0].release()

    def _note_answer(self) -> None:
        if self._has_stepped:  # and that step is over
            self._answered.set()

    def _phase(self) -> str:
        if self.error is not None:
            return "failed"
        if self.is_over:
            return "done"
        return "checking" if self._built.is_set() else "compiling"

    def _end(self) -> None:
        self._pieces = {}
        self._ended = time.monotonic()
        self.is_over = True

    def _give_back(self, executable: Executable) -> None:
        for key, piece in self._pieces.items():
            executable.replace_tile(key, piece)
        executable.choose_attention("reference")
        self._tiles_taken = 0

    def _use(self, part: Part, executable: Executable) -> None:
        super()._use(part, executable)
        self._tiles_taken += part.tile is not None

    def _run(self) -> None:
        try:
            super()._run()
            self._built.set()
            if self._result is not None and self._program is not None:
                self._run_canary(self._result[0])
        finally:
            self._built.set()
            self._checked.set()

    def _run_canary(self, bundle: Bundle) -> None:
        self._serving.wait()
        if self._cancelled or self._check is None:
            return
        torch.set_num_threads(1)  # of this thread: steps are running
        try:
            self.canary = self._check(bundle)
            logger.info("%s", self.canary.as_text())
        except Exception as error:  # whatever it is, the code was not shown to be right
            if not isinstance(error, GirihError):
                error = BundleError(f"the canary did not run: {type(error).__name__}: {error}")
            logger.critical(
                "COMPILED CODE IS REJECTED, eager pieces answer from now on (slowly): %s", error
            )
            self.error, self.was_rejected = error, True
