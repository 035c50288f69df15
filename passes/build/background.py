"""Building a bundle while eager pieces already answer (`compile.mode=background`).

    thread        trace ─ lower ─ partition ─┬─ tile ─ tile ─ … ─ seal
    engine                                   └─ eager pieces ─ step ─ step ─ (parts taken in) ─ step

The build runs in a thread of its own, which mostly waits for compilers. They start after the split:
the engine waits for that, and beside compilers it takes twice as long. What is finished is put in a
queue; the engine takes it in between two steps, so that no step mixes old and new code paths.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from girih.graph.bundle.bundle import Bundle, BundleOrigin
from girih.graph.execute.executable import Executable
from girih.graph.partition.partition import Program
from girih.graph.tiles.inductor import load_tile
from girih.kernels.base.errors import GirihError
from girih.kernels.base.progress import Progress, ProgressEvent
from girih.kernels.build.library import load_library

log = logging.getLogger("girih.build")

CANCEL_SECONDS = 5.0


@dataclass(frozen=True)
class Part:
    """A finished part of a bundle.

    Attributes:
        tile: the tile's key, or None for the kernel library.
        path: its file while the bundle is being built.
    """

    tile: str | None
    path: Path


class BuildObserver:
    """Told how a build gets on. The default does nothing.

    Attributes:
        waits_for_split: somebody does, so no compiler is to run before `split` returned.
    """

    waits_for_split = False

    def started(self, stop: Callable[[], None]) -> None:
        """The build runs; `stop` ends its compilers, and so the build with an error."""

    def split(self, program: Program) -> None:
        """The model is traced, lowered and split: eager pieces can run."""

    def finished(self, part: Part) -> None:
        """A part is compiled."""


class BackgroundBuild(BuildObserver):
    """A build in a thread of its own.

    Args:
        build: finds or builds the bundle, telling the observer; returns the bundle and its origin.
        progress: observer of the build until eager pieces can run.

    Attributes:
        total: parts there are to compile: the kernel library and the tiles.
        taken: parts the engine runs by now.
        error: why the build failed, or None.
    """

    waits_for_split = True

    def __init__(
        self,
        build: Callable[[BuildObserver, Progress], tuple[Bundle, BundleOrigin]],
        progress: Progress,
    ) -> None:
        self.total = 0
        self.taken = 0
        self.error: Exception | None = None
        self._build = build
        self._progress = progress
        self._program: Program | None = None
        self._result: tuple[Bundle, BundleOrigin] | None = None
        self._parts: SimpleQueue[Part] = SimpleQueue()
        self._ready = threading.Event()  # split, or ended
        self._stop: Callable[[], None] | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="girih-build", daemon=True)
        self._thread.start()
        atexit.register(self.cancel)
        threading.Thread(target=self._cancel_after_main, name="girih-exit", daemon=True).start()

    def program(self) -> Program | None:
        """Wait for the split program; None when a bundle was found, so that nothing is built.

        Raises:
            GirihError: the build failed before there was a program.
        """
        self._ready.wait()
        if self._program is None and self.error is not None:
            raise self.error
        return self._program

    def result(self) -> tuple[Bundle, BundleOrigin]:
        """Wait for the bundle and its origin.

        Raises:
            GirihError: the build failed.
        """
        self._thread.join()
        if self.error is not None:
            raise self.error
        assert self._result is not None, "a build ends with a bundle or an error"
        return self._result

    def take_in(self, executable: Executable) -> bool:
        """Have `executable` use what is finished; called between two steps.

        Returns:
            Whether more is to come.
        """
        while self.error is None and not self._parts.empty():
            try:
                self._use(self._parts.get(), executable)
            except (GirihError, OSError) as error:
                self.error = error
                log.warning("compiled code is not taken in, eager pieces go on: %s", error)
                return False
            self.taken += 1
            log.info("running %d of %d compiled parts", self.taken, self.total)
        return self.taken < self.total and self.error is None

    def cancel(self) -> None:
        """End the build, if it still runs, and its compilers."""
        self._cancelled = True
        if self._stop is not None and self._thread.is_alive():
            self._stop()
        self._thread.join(CANCEL_SECONDS)
        atexit.unregister(self.cancel)

    def _cancel_after_main(self) -> None:
        """Executors are waited for before `atexit` runs: end what they wait for."""
        threading.main_thread().join()
        self.cancel()

    # ---- as observer, in the thread ----

    def started(self, stop: Callable[[], None]) -> None:
        """See `BuildObserver.started`."""
        self._stop = stop
        if self._cancelled:
            stop()

    def split(self, program: Program) -> None:
        """See `BuildObserver.split`."""
        self.total = 1 + len(program.tiles)
        self._program = program
        self._ready.set()

    def finished(self, part: Part) -> None:
        """See `BuildObserver.finished`."""
        self._parts.put(part)

    def _run(self) -> None:
        try:
            self._result = self._build(self, self._tell)
        except Exception as error:
            self.error = error
            if self._program is not None and not self._cancelled:
                log.warning("compiling failed, eager pieces go on answering: %s", error)
        finally:
            self._ready.set()

    def _tell(self, event: ProgressEvent) -> None:
        """Pass progress on while the caller waits; later it would come from a strange thread."""
        if not self._ready.is_set():
            self._progress(event)

    def _use(self, part: Part, executable: Executable) -> None:
        """Load a part; its working directory becomes the bundle, or goes, at any moment."""
        try:
            self._load(part.tile, part.path, executable)
        except (GirihError, OSError):
            if part.path.exists():
                raise
            bundle, _ = self.result()
            path = bundle.library if part.tile is None else bundle.package(part.tile)
            self._load(part.tile, path, executable)

    @staticmethod
    def _load(tile: str | None, path: Path, executable: Executable) -> None:
        if tile is None:
            load_library(path)
            executable.choose_attention()
        else:
            executable.replace_tile(tile, load_tile(path))
