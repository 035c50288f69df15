"""Sends the lines of a batch, so many at a time, and writes the answers in order."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from girih.kernels.base.errors import EngineError
from girih.serve.offline.batch_lines import BatchLine, BatchOutput

LOOK_AHEAD = 4  # answers may be so many times `concurrency` lines ahead of the slowest one
BUSY = (429, 503)
MAX_TRIES = 8
MAX_LOSSES = 3  # tries that may end because the server, or its engine, went away meanwhile
RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
HEADERS = {"content-type": "application/json"}


class LineError(Exception):
    """A line has no answer, though the server lives."""


@dataclass
class BatchCounts:
    """Progress of a batch.

    Attributes:
        kept: lines answered by an earlier run.
        answered: lines with status 200.
        refused: lines the server answered with an error.
        unusable: lines that could not be sent, or that the server does not answer.
    """

    kept: int = 0
    answered: int = 0
    refused: int = 0
    unusable: int = 0

    def note(self, answer: dict[str, Any]) -> None:
        """Count one answer."""
        if answer["response"] is None:
            self.unusable += 1
        elif answer["response"]["status_code"] == 200:
            self.answered += 1
        else:
            self.refused += 1

    def __str__(self) -> str:
        text = f"{self.answered} answered, {self.refused} refused, {self.unusable} unusable"
        return text + (f", {self.kept} kept from an earlier run" if self.kept else "")


class BatchRun:
    """One run over a batch.

    Args:
        client: reaches the server.
        output: where answers go.
        concurrency: lines under way together.
        observer: told after every line.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        output: BatchOutput,
        concurrency: int,
        observer: Callable[[BatchCounts], None] = lambda counts: None,
    ) -> None:
        self.counts = BatchCounts()
        self._client = client
        self._output = output
        self._slots = asyncio.Semaphore(concurrency)
        self._window = concurrency * LOOK_AHEAD
        self._observer = observer

    async def run(self, lines: Iterator[BatchLine]) -> None:
        """Answer every line that was not answered before.

        Raises:
            EngineError: the server is gone, or its engine; what was answered stays, a new run
                goes on from there.
        """
        pending: deque[asyncio.Task[dict[str, Any]]] = deque()
        try:
            for place, line in enumerate(lines):
                if place < len(self._output.done):
                    self.counts.kept += 1
                    continue
                pending.append(asyncio.create_task(self._answer(line)))
                if len(pending) >= self._window:
                    await self._write(pending)
            while pending:
                await self._write(pending)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def _write(self, pending: deque[asyncio.Task[dict[str, Any]]]) -> None:
        answer = await pending[0]
        pending.popleft()
        self._output.write(answer)
        self.counts.note(answer)
        self._observer(self.counts)

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": None,
            "error": None,
        }
        if line.problem is not None:
            return answer | {"error": _error(line, "invalid_line", line.problem)}
        try:
            async with self._slots:
                response = await self._send(line)
        except LineError as error:
            return answer | {"error": _error(line, "not_answered", str(error))}
        answer["response"] = {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id"),
            "body": _body(response),
        }
        return answer

    async def _send(self, line: BatchLine) -> httpx.Response:
        """Send a line; a server that is busy, or briefly without an engine, is asked again."""
        for attempt in range(1, MAX_TRIES + 1):
            wait = ""
            try:
                response = await self._client.post(line.url, content=line.body, headers=HEADERS)
                is_lost = await self._has_lost_engine(response)
            except (httpx.RequestError, httpx.InvalidURL) as error:
                if attempt >= MAX_LOSSES:
                    await self._require_server()
                    raise LineError(f"the server lives, but gives no answer: {error!r}") from error
            else:
                may_wait = attempt < (MAX_TRIES if response.status_code in BUSY else MAX_LOSSES)
                if is_lost and not may_wait:
                    raise EngineError(f"the server lost its engine: {_error_of(response)}")
                if not is_lost and not (response.status_code in BUSY and may_wait):
                    return response
                wait = response.headers.get("retry-after", "")
            hinted = float(wait) if wait.isdecimal() else RETRY_SECONDS * 2 ** (attempt - 1)
            await asyncio.sleep(min(hinted, MAX_RETRY_SECONDS))
        raise AssertionError("the last try returns or raises")

    async def _require_server(self) -> None:
        """Raise `EngineError` unless the server answers anything at all."""
        try:
            await self._client.get("/health")
        except httpx.RequestError as error:
            raise EngineError(f"the server does not answer: {error!r}") from error

    async def _has_lost_engine(self, response: httpx.Response) -> bool:
        """Return whether an answer is an error of the engine's end, not of the line."""
        code = _error_of(response).get("code")
        if code != "generation_failed":
            return code == "engine_error"
        await asyncio.sleep(RETRY_SECONDS)  # an engine may say why a step failed before it ends
        return (await self._client.get("/ready")).status_code == 503


def _error(line: BatchLine, code: str, problem: str) -> dict[str, str]:
    return {"code": code, "message": f"line {line.number}: {problem}"}


def _error_of(response: httpx.Response) -> dict[str, Any]:
    """The error in an answer, with message and code; empty if it has none."""
    body = _body(response) if response.is_error else None
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def _body(response: httpx.Response) -> Any:
    try:
        return response.json()
    except (ValueError, RecursionError):
        return {"error": {"message": response.text[:1000], "type": "server_error"}}
