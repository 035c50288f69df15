"""The process of an engine core, before it is told what to build.

    front end                      core's process
      spawn_core ─ spawn ────────▶ import torch and the runtime (if ahead) ─┐
      …read the configuration…                                             │
      begin(build, address) ─────▶ run_core ◀───────────────────────────────┘

Importing torch takes longer than anything a front end has to know first, so a server spawns its
core before it reads its configuration. Few imports here, for that reason.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from girih.runtime.client.transport import Build


class SpawnedCore:
    """A process that waits to be told what to build.

    Attributes:
        process: it.
        pipe: this side's end of a pipe to it.
    """

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe
        self._has_begun = False

    def begin(self, build: Build, address: str) -> None:
        """Have it build an engine and serve it; whoever calls this owns the process from then on.

        Args:
            build: makes the engine, there; it must be picklable.
            address: where the core is to listen.
        """
        self._has_begun = True
        with contextlib.suppress(BrokenPipeError):  # it died: its exit code says more
            self.pipe.send((build, address))

    def discard(self) -> None:
        """End a process that nobody told what to build."""
        if not self._has_begun:
            self.process.kill()
            self.process.join()
            self.pipe.close()


def spawn_core(is_ahead: bool = False) -> SpawnedCore:
    """Start a core's process.

    Args:
        is_ahead: it imports what an engine needs while it waits.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_main, args=(theirs, is_ahead), name="girih-core")
    process.start()
    theirs.close()
    return SpawnedCore(process, ours)


@contextlib.contextmanager
def core_ahead() -> Iterator[SpawnedCore]:
    """A core's process that is ahead, and ended if nobody used it."""
    core = spawn_core(is_ahead=True)
    try:
        yield core
    finally:
        core.discard()


def name_process(name: str) -> None:
    """Show `name` (at most 15 characters) in `ps` and `top` instead of "python"."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def _main(pipe: Connection, is_ahead: bool) -> None:
    os.setsid()
    name_process("girih-core")
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored here, not in compilers it starts
        signal.signal(number, lambda *_: None)
    gc.disable()  # until the engine is built, see `girih.kernels.base.garbage`
    if is_ahead:
        importlib.import_module("girih.runtime.start.launch")
    try:
        build, address = pipe.recv()
    except EOFError:  # the front end ended
        return
    from girih.runtime.client.core_process import run_core

    run_core(build, address, pipe)
