"""The server process: opens the port at once, builds the engine beside it, ends cleanly.

main thread: uvicorn's event loop      ┐
build thread: build ─▶ ready or failed ┤─▶ ServerState ─▶ /ready
engine thread: steps (from ready on)   ┘
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn

from girih.graph.progress import Progress, ProgressEvent, no_progress
from girih.kernels.errors import EngineError, GirihError
from girih.serve.api.app import create_app
from girih.serve.api.state import Served, ServerState
from girih.serve.async_engine import AsyncEngine
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.inline_batch import EngineHandle
from girih.serve.sampling_defaults import SamplingDefaults, read_generation_config
from girih.serve.tokenizer import Tokenizer


@dataclass(frozen=True)
class Built:
    """What the build thread makes."""

    handle: EngineHandle
    tokenizer: Tokenizer


Build = Callable[[Progress], Built]


class GirihServer:
    """One server.

    Args:
        build: makes the engine; runs in its own thread.
        config: address and limits.
        sampling: overrides of the model's sampling defaults.
        policy: the scheduler's policy.
        progress: also told about the start-up work.
        announce: called with one line when the server is ready.
    """

    def __init__(
        self,
        build: Build,
        config: ServeConfig,
        *,
        sampling: SamplingConfig | None = None,
        policy: str = "fcfs",
        progress: Progress = no_progress,
        announce: Callable[[str], None] = print,
    ) -> None:
        self.state = ServerState(config)
        self.app = create_app(self.state, self._lifespan)
        self.error: BaseException | None = None
        self.port = config.port
        self._build = build
        self._config = config
        self._sampling = sampling
        self._policy = policy
        self._progress = progress
        self._announce = announce
        self._uvicorn: _Uvicorn | None = None
        self._builder = threading.Thread(target=self._run_build, name="girih-build", daemon=True)

    def run(self) -> int:
        """Serve until a signal; returns the exit code.

        Raises:
            EngineError: the address cannot be listened on.
        """
        listener = open_port(self._config.host, self._config.port)
        self.port = listener.getsockname()[1]
        settings = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, int(self._config.shutdown_seconds)),
            timeout_keep_alive=65,
            server_header=False,
        )
        self._uvicorn = _Uvicorn(settings, self._on_signal)
        with contextlib.closing(listener):
            self._uvicorn.run(sockets=[listener])
        if self.error is not None:
            raise self.error
        return 0

    def stop(self) -> None:
        """Take no new requests, let running ones finish for a while, then end."""
        self.state.draining = True
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True

    @property
    def is_building(self) -> bool:
        """Whether the build thread still works (it cannot be interrupted)."""
        return self._builder.is_alive()

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._builder.start()
        yield
        self.state.draining = True
        if self.state.served is not None:
            self.state.served.engine.close()

    def _run_build(self) -> None:
        try:
            built = self._build(self._on_progress)
            done: Callable[[], None] = lambda: self._set_ready(built)  # noqa: E731
        except BaseException as error:  # told to the main thread, which ends the process
            reason = error
            done = lambda: self._fail(reason)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits for this
            self._loop.call_soon_threadsafe(done)

    def _on_progress(self, event: ProgressEvent) -> None:
        self.state.on_progress(event)
        self._progress(event)

    def _set_ready(self, built: Built) -> None:
        if self.state.draining:
            return
        handle = built.handle
        engine = AsyncEngine(handle.core, built.tokenizer, self._on_engine_death)
        self.state.set_ready(
            Served(
                engine=engine,
                tokenizer=built.tokenizer,
                name=handle.name,
                key=handle.key,
                max_model_len=handle.max_model_len,
                vocab_size=handle.vocab_size,
                eos_token_ids=tuple(handle.eos_token_ids),
                defaults=SamplingDefaults(
                    read_generation_config(handle.model_path), self._sampling
                ),
                policy=self._policy,
            )
        )
        self._announce(self._ready_line(built))

    def _ready_line(self, built: Built) -> str:
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        url = f"http://{host}:{self.port}"
        if built.tokenizer.chat_template is not None:
            path, body = "chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
        else:
            path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 32}'
        seconds = self.state.readiness()["seconds"]
        key = " -H 'authorization: Bearer KEY'" if self._config.api_keys else ""
        return (
            f"{built.handle.name} is ready at {url} after {seconds} s; try: "
            f"curl {url}/v1/{path} -H 'content-type: application/json'{key} -d '{body}'"
        )

    def _fail(self, error: BaseException) -> None:
        self.state.failure = str(error) if isinstance(error, GirihError) else "start-up failed"
        self.error = error
        self.stop()

    def _on_engine_death(self, error: BaseException) -> None:
        """Stay up for a moment so that probes see why, then end with an error."""
        self.error = EngineError(f"the engine died: {type(error).__name__}: {error}")
        asyncio.get_running_loop().call_later(self._config.shutdown_seconds, self.stop)

    def _on_signal(self) -> None:
        if self.state.draining and self._uvicorn is not None:
            self._uvicorn.force_exit = True
        self.stop()


class _Uvicorn(uvicorn.Server):
    """uvicorn that ends with exit code 0 on SIGTERM and SIGINT."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals on the loop; uvicorn's own handler raises them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def open_port(host: str, port: int) -> socket.socket:
    """Bind the address.

    Raises:
        EngineError: it is in use, or not an address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as on_error:
            listener = on_error.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_error.pop_all()
    except OSError as error:
        raise EngineError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with "
            "port=N or host=ADDRESS"
        ) from error
    listener.set_inheritable(True)
    return listener


def exit_now(code: int) -> None:
    """End the process although a build thread is inside native code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
