"""The process of an engine core, from both sides.

    CoreSupervisor (front end's process)              run_core (the core's process)
      start ─ spawn (`core_spawn`) ─────────────────▶ build ─▶ CoreService.run
      pipe: "ready" or why it died ◀────────────────
      stop: says so on the pipe ────────────────────▶ ends; killed with its children if it does not

The pipe also ends when the front end's process is killed, so no core outlives its front end. A core
is a process group of its own: signals of a terminal do not reach it, the front end decides when it
ends. What compiles tiles ends with it (`girih.graph.tiles.worker`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from girih.kernels.base.errors import EngineError, GirihError
from girih.kernels.base.garbage import set_aside
from girih.kernels.base.progress import Progress
from girih.runtime.client.core_endpoint import CoreEndpoint
from girih.runtime.client.core_service import CoreService
from girih.runtime.client.core_spawn import SpawnedCore, spawn_core
from girih.runtime.client.socket_folder import SocketFolder
from girih.runtime.records.messages import Died, EngineFacts, Refusal, decode_message, encode

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # a core that has not ended by then is killed
MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0
READY, STOP = b"ready", b"stop"


class BuiltEngine(Protocol):
    """What `girih.runtime.start.launch.build_engine` returns, as far as this module looks."""

    @property
    def core(self) -> Any:
        """The engine core."""

    @property
    def facts(self) -> EngineFacts:
        """What front ends are told."""


Build = Callable[[Progress], BuiltEngine]


# ---- in the core's process ----


def run_core(build: Build, address: str, parent: Connection) -> None:
    """Build an engine and serve it; what a core's process does.

    Args:
        build: makes the engine.
        address: where to listen.
        parent: pipe to the front end that started this process.
    """
    watcher = _ParentWatcher(parent)
    endpoint = None
    try:
        endpoint = CoreEndpoint(address)
        built = build(endpoint.tell_progress)
        service = CoreService(built.core, built.facts, endpoint)
        set_aside()
        watcher.on_end = service.stop
        parent.send_bytes(READY)
        service.run()
    except BaseException as error:
        if not isinstance(error, GirihError):  # the front end tells what was raised on purpose
            logger.error("the engine process ends", exc_info=True)
        died = Died(Refusal.of(error))
        if endpoint is not None:
            endpoint.broadcast(died)
        with contextlib.suppress(OSError):
            parent.send_bytes(encode(died))
        _leave(endpoint, 1)
    _leave(endpoint, 0)


def _leave(endpoint: CoreEndpoint | None, code: int) -> NoReturn:
    if endpoint is not None:
        endpoint.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a step may still run in native code; nobody waits for it


class _ParentWatcher:
    """Ends this process soon after the parent said so, or died."""

    def __init__(self, parent: Connection) -> None:
        self.on_end: Callable[[], None] | None = None
        self._parent = parent
        threading.Thread(target=self._watch, name="girih-parent", daemon=True).start()

    def _watch(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            self._parent.recv_bytes()
        if self.on_end is not None:
            self.on_end()
            time.sleep(STOP_SECONDS)
        os.killpg(0, signal.SIGKILL)


# ---- in the front end's process ----


class CoreSupervisor:
    """Starts a core's process, watches it, and starts it again when it may.

    Args:
        build: makes the engine, in the other process; it must be picklable.
        restart: start a core again that died after it had been ready.
        on_end: called in a thread of this object when the core is gone for good.
        ahead: the process to use for the first core instead of a new one.

    Attributes:
        address: where front ends connect, the same for every core this object starts.
    """

    def __init__(
        self,
        build: Build,
        restart: bool,
        on_end: Callable[[GirihError], None],
        ahead: SpawnedCore | None = None,
    ) -> None:
        self._folder = SocketFolder()
        self.address = f"ipc://{self._folder.socket}"
        self._build = build
        self._restart = restart
        self._on_end = on_end
        self._ahead = ahead
        self._is_stopping = False
        self._restarts: list[float] = []
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._watcher = threading.Thread(target=self._watch, name="girih-supervisor", daemon=True)

    @property
    def is_running(self) -> bool:
        """Whether there is a core, or another one comes."""
        return self._watcher.is_alive()

    @property
    def pid(self) -> int | None:
        """Process id of the running core."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the core's process and a thread that watches it."""
        atexit.register(self.stop)  # before multiprocessing, which waits for children, does
        self._spawn()
        self._watcher.start()

    def stop(self) -> None:
        """End the core, by force if it takes longer than `STOP_SECONDS`."""
        with self._lock:
            self._is_stopping = True
            process, pipe = self._process, self._pipe
        if process is not None and pipe is not None:
            with contextlib.suppress(OSError):
                pipe.send_bytes(STOP)
            process.join(STOP_SECONDS + 1)
            _kill_group(process)
        self._folder.remove()
        atexit.unregister(self.stop)

    def _spawn(self) -> None:
        with self._lock:
            if self._is_stopping:
                return
            self._folder.socket.unlink(missing_ok=True)
            core, self._ahead = self._ahead or spawn_core(), None
            self._process, self._pipe = core.process, core.pipe
            core.begin(self._build, self.address)

    def _watch(self) -> None:
        while True:
            process, pipe = self._process, self._pipe
            assert process is not None and pipe is not None
            was_ready, error = _read_until_end(pipe)
            process.join()
            if self._is_stopping:
                return
            _kill_group(process)
            if error is None:
                error = EngineError(f"the engine process ended with code {process.exitcode}")
            if not (was_ready and self._may_restart()):
                self._on_end(error)
                return
            logger.error("%s; it is started again", error)
            self._spawn()

    def _may_restart(self) -> bool:
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW_SECONDS]
        self._restarts.append(now)
        return self._restart and len(self._restarts) <= MAX_RESTARTS


def _read_until_end(pipe: Connection) -> tuple[bool, GirihError | None]:
    """Read what a core says of itself; returns (whether it was ready, why it died)."""
    was_ready, error = False, None
    with contextlib.suppress(EOFError, OSError):
        while True:
            data = pipe.recv_bytes()
            if data == READY:
                was_ready = True
                continue
            message = decode_message(data)
            if isinstance(message, Died):
                error = message.refusal.as_error()
    return was_ready, error


def _kill_group(process: multiprocessing.process.BaseProcess) -> None:
    """Kill what is left of a core and its process group."""
    process.kill()
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
