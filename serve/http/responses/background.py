"""Responses that nobody waits for: they run, are stored when they end, and can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from girih.serve.http.generation.chat_job import ChatJob


@dataclass(frozen=True)
class _Run:
    job: ChatJob
    task: asyncio.Task[None]


class BackgroundRuns:
    """Owns the running ones. A run ends by itself, by `cancel`, or with the engine."""

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, job: ChatJob, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which waits for `job` and stores what comes of it."""
        response_id, task = job.plan.response_id, asyncio.create_task(work)
        self._runs[response_id] = _Run(job, task)
        task.add_done_callback(lambda _: self._forget(response_id, task))

    async def cancel(self, response_id: str) -> bool:
        """End a run; returns when its response is stored. False when none has this id."""
        run = self._runs.get(response_id)
        if run is None:
            return False
        run.job.abort()
        await asyncio.shield(run.task)
        return True

    def _forget(self, response_id: str, task: asyncio.Task[None]) -> None:
        found = self._runs.get(response_id)
        if found is not None and found.task is task:  # a later run may have the same id
            del self._runs[response_id]
