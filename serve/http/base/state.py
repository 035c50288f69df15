"""State shared by the handlers: the engine, or the progress of its build until then."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from girih.kernels.base.errors import EngineError
from girih.kernels.base.progress import ProgressEvent
from girih.runtime.records.messages import EngineFacts
from girih.serve.config import ServeConfig
from girih.serve.engine.async_engine import AsyncEngine
from girih.serve.http.base.bodies import BodyType, read_body
from girih.serve.http.base.errors import RETRY_SECONDS, ApiError
from girih.serve.http.base.http_metrics import HttpSeen
from girih.serve.text.sampling_defaults import SamplingDefaults
from girih.serve.text.texts import require_task
from girih.serve.text.tokenizer import Tokenizer

ENGINE_SECONDS = 1.0  # a probe waits no longer for a step to end


@dataclass(frozen=True)
class Served:
    """A model that answers.

    Attributes:
        engine: takes requests.
        tokenizer: the model's.
        facts: what the engine says of the model.
        defaults: effective sampling defaults.
        policy: how the scheduler orders requests.
        model_names: what clients may call it, the first in answers; empty leaves the engine's name.
        created: Unix time of readiness.
    """

    engine: AsyncEngine
    tokenizer: Tokenizer
    facts: EngineFacts
    defaults: SamplingDefaults
    policy: str = "fcfs"
    model_names: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """The model ids that clients may use."""
        return self.model_names or (self.facts.name,)

    @property
    def name(self) -> str:
        """The model id in answers."""
        return self.names[0]

    @property
    def key(self) -> str:
        """The bundle's key, shown as `system_fingerprint`."""
        return self.facts.key

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.facts.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self.facts.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        return tuple(self.facts.eos_token_ids)


class ServerState:
    """The life of one server: loading, ready, draining or failed.

    Attributes:
        served: the model once it is ready.
        failure: why building failed, or None.
        draining: no new requests are taken.
        http_seen: HTTP requests that the metrics do not count yet.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.served: Served | None = None
        self.failure: str | None = None
        self.draining = False
        self.http_seen = HttpSeen()
        self._event: ProgressEvent | None = None
        self._started = time.monotonic()
        self._ready_after: float | None = None
        self._stats: dict[str, Any] = {}  # the engine's, as it told them last

    def on_progress(self, event: ProgressEvent) -> None:
        """Note how far building is (called from the building thread)."""
        self._event = event

    def set_ready(self, served: Served) -> None:
        """Start to answer."""
        self.served = served
        self._ready_after = time.monotonic() - self._started

    def require(self, model: str | None) -> Served:
        """Return the served model.

        Raises:
            ApiError: 503 while there is none, 404 when `model` is another one.
        """
        served = self.served
        if served is None or self.draining:
            raise ApiError(
                503,
                f"the server is {self.status}; ask /ready for its progress and try again",
                code=self.status,
                retry_after=RETRY_SECONDS if self.draining else 2,
            )
        if model is not None and model not in served.names:
            known = "', '".join(served.names)
            raise ApiError(
                404,
                f"the model '{model[:200]}' does not exist; this server has '{known}'",
                "model",
                "model_not_found",
            )
        return served

    @property
    def status(self) -> str:
        """ "loading", "ready", "draining" or "failed"."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if self.served is None else "ready"

    @property
    def is_ready(self) -> bool:
        """True if requests are answered now."""
        if self.status != "ready" or self.served is None:
            return False
        return self.served.engine.health(self.config.stall_seconds).ready

    async def engine_readiness(self) -> dict[str, Any]:
        """Return what the engine adds to the body of /ready: whether it sleeps, what compiles.

        An engine that does not answer soon is described as it was before.
        """
        assert self.served is not None, "asked of a server that is ready"
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ENGINE_SECONDS):
                self._stats = await self.served.engine.stats()
        body: dict[str, Any] = {}
        compiling, operation = self._stats.get("compiling"), self._stats.get("operation", {})
        if compiling:
            body["compiling"] = {k: v for k, v in compiling.items() if k != "detail"}
        if operation.get("sleep_level"):
            body |= {"status": "asleep", "sleep_level": operation["sleep_level"]}
        elif operation.get("pending"):
            body |= {"status": "closing", "detail": operation["pending"]}
        return body

    def health(self) -> tuple[bool, str]:
        """Return (whether the process makes progress, why not)."""
        if self.failure is not None:
            return False, self.failure
        if self.served is None:
            return True, "loading"
        health = self.served.engine.health(self.config.stall_seconds)
        return health.alive, health.detail

    def readiness(self) -> dict[str, Any]:
        """Return the body of /ready."""
        seconds = self._ready_after or time.monotonic() - self._started
        body: dict[str, Any] = {"status": self.status, "seconds": round(seconds, 2)}
        alive, detail = self.health()
        if not alive:
            body |= {"status": "failed", "detail": detail}
        event = self._event
        if self.status == "loading" and event is not None:
            body |= {
                "stage": event.stage,
                "done": event.done,
                "total": event.total,
                "detail": event.detail,
            }
        return body


async def open_request(
    request: Request, kind: type[BodyType], tasks: Sequence[str] = ("generate",)
) -> tuple[ServerState, BodyType, Served]:
    """Read the body of a request for the served model.

    Args:
        request: the HTTP request.
        kind: of its body.
        tasks: what the model must be for: one of these.

    Raises:
        RequestError: the model has another task.
        ApiError: 503 before anything is read while there is no model; what `read_body` refuses;
            404 when the body names another model.
    """
    state: ServerState = request.app.state.server
    state.require(None)
    body = await read_body(request, kind)
    served = state.require(getattr(body, "model", None))
    require_task(served.facts, tasks)
    return state, body, served
