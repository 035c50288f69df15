"""The server process: opens the port at once, has the engine built beside it, ends cleanly.

    starting ─▶ ready ─▶ draining ─▶ ended         ServerState tells /health and /ready
        ╰── failed ──────────────────────╯

A signal starts the drain: /ready turns 503 and new requests are refused while the port stays open,
running requests get `serve.drain_seconds`, then those left get an error and the process ends. A
second signal skips the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import uvicorn

from girih.kernels.base.errors import EngineError, GirihError
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress
from girih.runtime.client.client import CoreClient
from girih.runtime.records.messages import EngineFacts
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.engine.async_engine import AsyncEngine
from girih.serve.http.app import create_app
from girih.serve.http.base.connection import connection_type
from girih.serve.http.base.state import Served, ServerState
from girih.serve.http.port import check_certificate, open_port
from girih.serve.text.sampling_defaults import SamplingDefaults, read_generation_config
from girih.serve.text.tokenizer import Tokenizer
from girih.serve.text.tokenizer_ahead import TokenizerAhead

logger = logging.getLogger(__name__)

DEATH_NOTICE_SECONDS = 2.0  # a dead engine's server stays up so long, for probes to see why
LAST_WORDS_SECONDS = 2  # for responses that just ended to leave
POLL_SECONDS = 0.02


class GirihServer:
    """One server.

    Args:
        client: the way to the engine; closed when the server ends.
        config: address and limits.
        sampling: overrides of the model's sampling defaults.
        policy: the scheduler's policy.
        tokenizer: instead of the model's own.
        progress: also told about the start-up work.
        announce: called with one line when the server is ready.
    """

    def __init__(
        self,
        client: CoreClient,
        config: ServeConfig,
        *,
        sampling: SamplingConfig | None = None,
        policy: str = "fcfs",
        tokenizer: Tokenizer | None = None,
        progress: Progress = no_progress,
        announce: Callable[[str], None] = print,
    ) -> None:
        self.state = ServerState(config)
        self.app = create_app(self.state, self._lifespan)
        self.error: BaseException | None = None
        self.port = config.port
        self._client = client
        self._engine: AsyncEngine | None = None
        self._tokenizer = tokenizer
        self._config = config
        self._sampling = sampling
        self._policy = policy
        self._progress = progress
        self._announce = announce
        self._uvicorn: _Uvicorn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False

    def run(self, listener: socket.socket | None = None) -> int:
        """Serve until a signal; returns the exit code.

        Args:
            listener: a bound socket to serve on instead of opening the configured address.

        Raises:
            ConfigError: the certificate cannot be used.
            EngineError: the address cannot be listened on, or the engine died.
        """
        try:
            check_certificate(self._config)
            with listener or open_port(self._config.host, self._config.port) as listener:
                self.port = listener.getsockname()[1]
                self._uvicorn = _Uvicorn(self._uvicorn_config(), self._on_signal)
                self._uvicorn.run(sockets=[listener])
        finally:
            self._client.close()
        if self.error is not None:
            raise self.error
        return 0

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.app,
            http=connection_type(self._config.body_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=LAST_WORDS_SECONDS,
            timeout_keep_alive=65,
            server_header=False,
            ssl_certfile=self._config.ssl_certfile,
            ssl_keyfile=self._config.ssl_keyfile,
        )

    def stop(self) -> None:
        """Take no new requests, let running ones finish for a while, then end (any thread)."""
        self.state.draining = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._begin_drain)

    @property
    def is_building(self) -> bool:
        """True if a thread still builds (it cannot be interrupted)."""
        return self._client.transport.is_building()

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self._start_engine())
        yield
        self.state.draining = True
        starting.cancel()
        if self._drain is not None:
            self._drain.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if self._engine is not None:
            self._engine.close()

    async def _start_engine(self) -> None:
        try:
            await self._await_engine()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # told to the main thread, which ends the process
            self._fail(error)

    async def _await_engine(self) -> None:
        ahead = TokenizerAhead(self._on_progress)
        self._client.progress = self._on_progress if self._tokenizer else ahead.on_progress
        self._client.start()
        self._engine = engine = AsyncEngine(self._client, self._on_engine_death)
        facts = await engine.ready()
        tokenizer = self._tokenizer
        if tokenizer is None:
            tokenizer = await asyncio.to_thread(ahead.result, Path(facts.model_path))
        if self._client.error is not None:  # the core ended meanwhile
            raise self._client.error
        engine.vocabulary = tokenizer
        if not self.state.draining:
            self._set_ready(engine, facts, tokenizer)

    def _on_progress(self, event: ProgressEvent) -> None:
        self.state.on_progress(event)
        self._progress(event)

    def _set_ready(self, engine: AsyncEngine, facts: EngineFacts, tokenizer: Tokenizer) -> None:
        served = Served(
            engine=engine,
            tokenizer=tokenizer,
            facts=facts,
            defaults=SamplingDefaults(
                read_generation_config(Path(facts.model_path)), self._sampling
            ),
            policy=self._policy,
            model_names=self._config.model_names,
        )
        self.state.set_ready(served)
        if facts.task == "generate" and served.defaults.as_text():
            logger.info("requests that say nothing else take %s", served.defaults.as_text())
        self._announce(self._ready_line(served))

    def _ready_line(self, served: Served) -> str:
        host = "127.0.0.1" if self._config.host in ("0.0.0.0", "::") else self._config.host
        scheme = "https" if self._config.ssl_certfile is not None else "http"
        url = f"{scheme}://{host}:{self.port}"
        if served.facts.task != "generate":
            path = "embeddings" if served.facts.task == "embed" else "classify"
            body = '{"input": "Hello!"}'
        elif served.tokenizer.chat_templates:
            path = "chat/completions"
            message = '{"role": "user", "content": "Hello!"}'
            body = f'{{"temperature": 0, "max_tokens": 64, "messages": [{message}]}}'
        else:
            path, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 32}'
        seconds = self.state.readiness()["seconds"]
        key = " -H 'authorization: Bearer KEY'" if self._config.api_keys else ""
        return (
            f"{served.name} is ready at {url} after {seconds} s; try: "
            f"curl {url}/v1/{path} -H 'content-type: application/json'{key} -d '{body}'"
        )

    def _fail(self, error: BaseException) -> None:
        self.state.failure = str(error) if isinstance(error, GirihError) else "start-up failed"
        self.error = error
        self.stop()

    def _on_engine_death(self, error: BaseException) -> None:
        """Stay up for a moment so that probes see why, then end with an error."""
        self.error = EngineError(f"the engine died: {type(error).__name__}: {error}")
        asyncio.get_running_loop().call_later(DEATH_NOTICE_SECONDS, self.stop)

    def _on_signal(self) -> None:
        if self.state.draining:
            self._is_hurried = True
        self.stop()

    def _begin_drain(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        loop, served = asyncio.get_running_loop(), self.state.served
        deadline = loop.time() + self._config.drain_seconds
        if served is not None:
            while served.engine.num_requests and loop.time() < deadline and not self._is_hurried:
                await asyncio.sleep(POLL_SECONDS)
            served.engine.fail_all("the server is shutting down")
        assert self._uvicorn is not None
        self._uvicorn.should_exit = True


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


def exit_now(code: int) -> None:
    """End the process although a build thread is inside native code."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
