"""Sends one request and notes when each piece of its answer comes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any

import httpx

from girih.kernels.base.errors import ConfigError, EngineError
from girih.serve.bench.config import APIS, EndpointConfig
from girih.serve.bench.datasets import BenchRequest
from girih.serve.bench.records import RequestRecord
from girih.serve.sse import sse_events_async, sse_lines_async

POLL_SECONDS = 0.5


class EndpointClient:
    """A client of one endpoint; use it as an asynchronous context manager.

    Args:
        config: the endpoint.
        clock: seconds after the start of the measurement.
    """

    def __init__(self, config: EndpointConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._model = config.model
        key = config.api_key or os.environ.get("OPENAI_API_KEY")
        self._http = httpx.AsyncClient(
            base_url=config.root,
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(config.timeout_seconds, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        )

    @property
    def model(self) -> str | None:
        """The name sent with each request."""
        return self._model

    async def __aenter__(self) -> EndpointClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Wait until the server answers, and take its model's name when none was given.

        Raises:
            EngineError: it cannot be reached, or refuses.
            ConfigError: it does not list its models.
        """
        deadline = time.monotonic() + self._config.wait_seconds
        while True:
            answer = await self._list_models()
            if isinstance(answer, httpx.Response) and answer.status_code != 503:
                break
            if time.monotonic() >= deadline:
                raise EngineError(_unreachable(self._config, answer))
            await asyncio.sleep(POLL_SECONDS)
        if answer.status_code in (401, 403):
            raise EngineError(f"{self._config.root} refuses the key ({answer.status_code})")
        if self._model is None:
            self._model = _first_model(self._config.root, answer)

    async def _list_models(self) -> httpx.Response | httpx.TransportError:
        try:
            return await self._http.get("/v1/models")
        except httpx.TransportError as error:
            return error

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Send one request and fill its record; a failure is noted there, not raised."""
        record.sent = self._clock()
        try:
            async with self._http.stream(
                "POST", APIS[self._config.api], json=self._body(request)
            ) as response:
                if response.status_code != 200:
                    record.error = _refusal(response.status_code, await response.aread())
                else:
                    await self._read(response, record)
        except (httpx.HTTPError, EngineError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"
        record.ended = self._clock()

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_len,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._config.ignore_eos:
            body["ignore_eos"] = True
        if self._config.api == "completions":
            body["prompt"] = request.prompt
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["messages"] = request.prompt
        return {**body, **self._config.extra_fields()}

    async def _read(self, response: httpx.Response, record: RequestRecord) -> None:
        async for event in sse_events_async(sse_lines_async(response.aiter_text())):
            note_event(event, record, self._clock())
        if record.counted_by == "pieces":
            record.num_output_tokens = len(record.pieces)
        if record.error is None and not record.pieces:
            record.error = "the answer has no token"


def note_event(event: dict[str, Any], record: RequestRecord, now: float) -> None:
    """Digest one server-sent event that came at `now`."""
    if "error" in event:
        record.error = str(event["error"].get("message", event["error"]))
        return
    for choice in event.get("choices", []):
        if _has_token(choice):
            record.pieces.append(now)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason
    usage = event.get("usage")
    if usage:
        record.num_prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        record.num_cached_tokens = details.get("cached_tokens")
        record.num_output_tokens = usage.get("completion_tokens") or 0
        record.counted_by = "server"


def _has_token(choice: dict[str, Any]) -> bool:
    """Return whether a choice carries part of the answer (not only a role, or only the end)."""
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta = choice.get("delta") or {}
    return any(
        delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")
    )


def _refusal(status: int, raw: bytes) -> str:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode("utf-8", "replace")
    return f"{status}: {message}"


def _unreachable(config: EndpointConfig, answer: httpx.Response | httpx.TransportError) -> str:
    why = "it is not ready" if isinstance(answer, httpx.Response) else str(answer)
    return (
        f"no server answers at {config.root} after {config.wait_seconds:g} s ({why}); start one "
        "with `girih serve`, set base_url, or wait longer with endpoint.wait_seconds"
    )


def _first_model(root: str, answer: httpx.Response) -> str:
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{root} does not list its models; name one with model=NAME") from error
