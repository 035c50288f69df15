"""The process of an engine core, as its front end sees it: started, watched, started again, ended.

    CoreSupervisor (front end's process)              core's process
      start ─ spawn (`spawn`) ──────────────────────▶ run_core (`core_process`)
      pipe: "ready" or why it died ◀────────────────
      stop: says so on the pipe ────────────────────▶ ends; killed with its children if it does not

A core is a process group of its own: signals of a terminal do not reach it, the front end decides
when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from girih.kernels.base.errors import EngineError, GirihError
from girih.kernels.base.progress import Progress
from girih.runtime.client.core_process import READY, STOP, STOP_SECONDS
from girih.runtime.client.socket_folder import SocketFolder
from girih.runtime.client.spawn import SpawnedCore, spawn_core
from girih.runtime.client.transport import Build
from girih.runtime.client.zmq_transport import ZmqTransport
from girih.runtime.records.messages import Died, decode_message

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW_SECONDS = 300.0


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
        """True if there is a core, or another one comes."""
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


class ProcessTransport(ZmqTransport):
    """Starts a core in a process of its own, and ends it.

    Args:
        build: makes the engine there; it must be picklable.
        restarts: start a core again that died after it had been ready.
        ahead: the process to use for the first core instead of a new one.
    """

    def __init__(
        self, build: Build, restarts: bool = False, ahead: SpawnedCore | None = None
    ) -> None:
        self.supervisor = CoreSupervisor(build, restarts, self.fail, ahead)
        self._has_started = False
        super().__init__(self.supervisor.address, restarts)

    def start(self, progress: Progress) -> None:
        """See `Transport.start`."""
        if not self._has_started:
            self._has_started = True
            self.supervisor.start()

    def close(self) -> None:
        """See `Transport.close`."""
        super().close()
        self.supervisor.stop()
