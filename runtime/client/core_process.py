"""The main function of a core's process: build, core loop, exit when the front end exits.

The pipe to the front end also ends when that process is killed, so no core outlives its front end.
What compiles tiles ends with the core (`girih.graph.tiles.worker`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from girih.kernels.base.garbage import set_aside
from girih.runtime.client.loop import CoreLoop, serve_engine
from girih.runtime.client.transport import Build
from girih.runtime.client.zmq_port import ZmqPort
from girih.runtime.records.messages import Died, Refusal, encode

STOP_SECONDS = 5.0  # a core that has not ended by then is killed
READY, STOP = b"ready", b"stop"


def run_core(build: Build, address: str, parent: Connection) -> None:
    """Build an engine and serve it; what a core's process does.

    Args:
        build: makes the engine.
        address: where to listen.
        parent: pipe to the front end that started this process.
    """
    watcher = _ParentWatcher(parent)
    port = None

    def on_ready(loop: CoreLoop) -> None:
        set_aside()
        watcher.on_end = loop.stop
        parent.send_bytes(READY)

    try:
        port = ZmqPort(address)
        serve_engine(build, port, on_ready)
    except BaseException as error:
        with contextlib.suppress(OSError):
            parent.send_bytes(encode(Died(Refusal.of(error))))
        _leave(port, 1)
    _leave(port, 0)


def _leave(port: ZmqPort | None, code: int) -> NoReturn:
    if port is not None:
        port.close()
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
