"""A real HTTP server over a fake model: uvicorn in a thread, on a free port."""

from __future__ import annotations

import tempfile
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import support_tokenizer
from support_core import make_core
from support_fake_runner import FakeRunner

from girih.runtime.client.client import CoreClient
from girih.runtime.client.local_transport import LocalTransport
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.messages import EngineFacts
from girih.runtime.records.pooling_params import PoolingFacts
from girih.serve.config import SamplingConfig, ServeConfig
from girih.serve.http.server import GirihServer
from girih.serve.text.tokenizer import Tokenizer

MODEL = "fake"
EMBEDDER = PoolingFacts(mode="last", width=2, activation="identity")


@dataclass
class FakeEngine:
    """What building a real engine would return."""

    core: EngineCore
    facts: EngineFacts


def fake_engine(tokenizer: Tokenizer, *, eos: tuple[int, ...] = (), **options: Any) -> FakeEngine:
    """An engine over a `FakeRunner` with the tokenizer's vocabulary."""
    runner_keys = ("step_seconds", "fail_at", "next_token")
    settings = {key: options.pop(key) for key in runner_keys if key in options}
    runner = options.pop("runner", None) or FakeRunner(16, tokenizer.vocab_size, **settings)
    max_model_len = options.pop("max_model_len", 256)
    pooling = EMBEDDER if options.pop("embeds", False) else None
    task = "generate" if pooling is None else "embed"
    facts = EngineFacts(
        name=MODEL,
        key="fp_fake",
        model_path=tempfile.mkdtemp(),
        max_model_len=max_model_len,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=eos,
        task=task,
        pooling=pooling,
    )
    core = make_core(runner=runner, max_model_len=max_model_len, task=task, **options)
    return FakeEngine(core, facts)


class RunningServer:
    """Starts on entry, waits until ready (unless `hold` is given), stops and checks on exit.

    Args:
        serve: fields of `ServeConfig`.
        sampling: fields of `SamplingConfig`.
        hold: the build waits for this event.
        build_error: the build raises this.
        tokenizer: the model's; a byte-level one by default.
        options: for `fake_engine` (`embeds`: the model embeds instead of generating).
    """

    def __init__(
        self,
        *,
        serve: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        hold: threading.Event | None = None,
        build_error: BaseException | None = None,
        tokenizer: Tokenizer | None = None,
        policy: str = "fcfs",
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer or support_tokenizer.byte_level()
        self.engine = fake_engine(self.tokenizer, policy=policy, **options)
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self.exit_code: int | None = None
        self.hold = hold
        self._build_error = build_error
        config = ServeConfig(**{"port": 0, "drain_seconds": 1.0, **(serve or {})})
        self.server = GirihServer(
            CoreClient(LocalTransport(self._build)),
            config,
            tokenizer=self.tokenizer,
            sampling=SamplingConfig(**sampling) if sampling else None,
            policy=policy,
            announce=self.lines.append,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def core(self) -> EngineCore:
        """The engine core."""
        return self.engine.core

    @property
    def url(self) -> str:
        """Where the server listens."""
        scheme = "https" if self.server.state.config.ssl_certfile else "http"
        return f"{scheme}://127.0.0.1:{self.server.port}"

    @property
    def verify(self) -> Any:
        """How clients trust it."""
        return self.server.state.config.ssl_certfile or True

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(self.url + path, json=body, timeout=30, verify=self.verify)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET a path."""
        return httpx.get(self.url + path, timeout=30, verify=self.verify, **options)

    def wait_for(self, condition: Any, seconds: float = 20.0) -> None:
        """Poll until `condition()` holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true"
            time.sleep(0.01)

    def wait_idle(self) -> None:
        """Wait until the core has no request, then check that no block is lost."""
        self.wait_for(lambda: not self.core.has_work())
        self.core.check_integrity()
        pool = self.core.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_usable, "blocks leaked"
        assert self.core.runner.violations == []  # type: ignore[attr-defined]

    def join(self) -> None:
        """Wait until the server ended by itself."""
        self._thread.join(20)
        assert not self._thread.is_alive()

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self.wait_for(lambda: self._answers("/version") or self.error is not None)
        if self.hold is None and self._build_error is None:
            self.wait_for(lambda: self._answers("/ready"))
        return self

    def __exit__(self, *exc: object) -> None:
        if self.hold is not None:
            self.hold.set()
        if self.core.failure is None and self._thread.is_alive():
            self.wait_idle()
        self.server.stop()
        self.join()

    def _answers(self, path: str) -> bool:
        try:
            return self.get(path).status_code == 200
        except httpx.TransportError:
            return False

    def _build(self, progress: Any) -> FakeEngine:
        from girih.kernels.base.progress import ProgressEvent

        progress(ProgressEvent("compile", 1, 3, "tile 1 of 3"))
        if self.hold is not None:
            self.hold.wait(30)
        if self._build_error is not None:
            raise self._build_error
        return self.engine

    def _run(self) -> None:
        try:
            self.exit_code = self.server.run()
        except BaseException as error:
            self.error = error
