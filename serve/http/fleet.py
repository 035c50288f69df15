"""Several API processes that share one port and one engine core.

    ApiFleet (main process) ── CoreSupervisor ─▶ core's process
            │                                      ▲ ZMQ
            ╰── spawns, watches, forwards SIGTERM ─▶ N × GirihServer on the same listening socket
                pipe: why the core is gone for good

An API process that dies takes its own requests with it (the core drops them) and is replaced. Its
pipe ends when the main process does, and so does it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from girih.kernels.base.errors import EngineError, GirihError
from girih.runtime.client.client import CoreClient
from girih.runtime.client.spawn import SpawnedCore, name_process
from girih.runtime.client.supervisor import CoreSupervisor
from girih.runtime.client.transport import Build
from girih.runtime.client.zmq_transport import ZmqTransport
from girih.runtime.records.messages import Died, Refusal, decode_message, encode
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.http.port import check_certificate, open_port
from girih.serve.http.server import DEATH_NOTICE_SECONDS, LAST_WORDS_SECONDS, GirihServer
from girih.serve.logs import LogSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
GRACE_SECONDS = DEATH_NOTICE_SECONDS + LAST_WORDS_SECONDS
MAX_REPLACEMENTS = 10


@dataclass(frozen=True)
class FleetSettings:
    """Settings of every API process.

    Attributes:
        config: address and limits.
        sampling: overrides of the model's sampling defaults.
        policy: the scheduler's policy.
        restarts: whether another core comes when one dies.
        logs: how to log.
    """

    config: ServeConfig
    sampling: SamplingConfig | None = None
    policy: str = "fcfs"
    restarts: bool = False
    logs: LogSettings = field(default_factory=LogSettings)


@dataclass(frozen=True)
class ApiProcess:
    """An API process, and this side's end of a pipe to it."""

    process: BaseProcess
    pipe: Connection

    @property
    def is_alive(self) -> bool:
        """True if it runs."""
        return self.process.is_alive()

    def terminate(self) -> None:
        """Send SIGTERM, if it runs."""
        if self.process.is_alive():
            self.process.terminate()

    def tell(self, died: Died) -> None:
        """Say why the core is gone for good."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(encode(died))


class ApiFleet:
    """Runs the core and `config.api_processes` API processes.

    Args:
        build: makes the engine in the core's process; it must be picklable.
        settings: for the API processes.
        ahead: process to run the core in, see `CoreSupervisor`.
    """

    def __init__(
        self, build: Build, settings: FleetSettings, ahead: SpawnedCore | None = None
    ) -> None:
        self.port = settings.config.port
        self._settings = settings
        self._supervisor = CoreSupervisor(build, settings.restarts, self._on_core_end, ahead)
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[int, ApiProcess] = {}
        self._error: GirihError | None = None
        self._signals = 0
        self._num_replaced = 0

    def run(self) -> int:
        """Serve until a signal; returns the exit code.

        Raises:
            ConfigError: the certificate cannot be used.
            EngineError: the address cannot be listened on, or the engine died.
        """
        config = self._settings.config
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            check_certificate(config)
            listener = stack.enter_context(open_port(config.host, config.port))
            self.port = listener.getsockname()[1]
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, lambda *_: self.stop())
            self._supervisor.start()
            for index in range(config.api_processes):
                if not self._is_ending():
                    self._start(index, listener)
            self._watch(listener)
        if self._error is not None:
            raise self._error
        return 0

    def stop(self) -> None:
        """Drain and end; called again: end now."""
        self._signals += 1
        for process in list(self._processes.values()):
            process.terminate()

    def _end(self) -> None:
        self._supervisor.stop()
        for api in self._processes.values():
            api.process.kill()

    def _start(self, index: int, listener: socket.socket) -> None:
        theirs, ours = self._spawn.Pipe(duplex=False)
        process = self._spawn.Process(
            target=run_api,
            args=(listener, theirs, self._supervisor.address, self._settings, index == 0),
            name=f"girih-api-{index}",
        )
        process.start()
        theirs.close()
        self._processes[index] = ApiProcess(process, ours)
        if self._is_ending():  # since it was not known to `stop` yet
            self._processes[index].terminate()

    def _watch(self, listener: socket.socket) -> None:
        """Replace API processes that die; returns when all have ended and no more are wanted."""
        while self._processes:
            wait([api.process.sentinel for api in self._processes.values()], POLL_SECONDS)
            for index, api in list(self._processes.items()):
                if api.is_alive:
                    continue
                del self._processes[index]
                api.pipe.close()
                if not self._is_ending():
                    self._replace(index, api.process, listener)

    def _is_ending(self) -> bool:
        return self._signals > 0 or self._error is not None

    def _replace(self, index: int, process: BaseProcess, listener: socket.socket) -> None:
        self._num_replaced += 1
        logger.error("API process %d ended with code %s", index, process.exitcode)
        if self._num_replaced > MAX_REPLACEMENTS:
            self._error = EngineError(f"API processes ended {self._num_replaced} times")
            self.stop()
            return
        self._start(index, listener)

    def _on_core_end(self, error: GirihError) -> None:
        """Called in the supervisor's thread; API processes tell their clients and end soon."""
        self._error = error
        for api in list(self._processes.values()):
            api.tell(Died(Refusal.of(error)))
        time.sleep(GRACE_SECONDS)
        self.stop()


def run_api(
    listener: socket.socket,
    main: Connection,
    address: str,
    settings: FleetSettings,
    is_first: bool,
) -> None:
    """Serve HTTP for a core in another process; the target of an API process."""
    os.setsid()  # a terminal's signals go to the main process, which forwards what it wants
    name_process("girih-api")
    settings.logs.apply()
    transport = ZmqTransport(address, settings.restarts)
    server = GirihServer(
        CoreClient(transport),
        settings.config,
        sampling=settings.sampling,
        policy=settings.policy,
        announce=lambda line: print(line, flush=True) if is_first else None,
    )
    threading.Thread(target=_listen, args=(main, transport), name="girih-main", daemon=True).start()
    try:
        server.run(listener)
    except GirihError as error:
        logger.error("%s", error)
        os._exit(1)


def _listen(main: Connection, transport: ZmqTransport) -> None:
    """Pass on why the core is gone; ends this process when the main process ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = decode_message(main.recv_bytes())
            if isinstance(message, Died):
                transport.fail(message.refusal.as_error())
    os._exit(1)
