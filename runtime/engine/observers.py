"""Who may watch a core: records of what it did, and the times of each request made from them.

    EngineCore ── on_request, on_step, on_end ─▶ observers (metrics, trace, status line)
                                                     ╰ RequestClock: one `RequestTimes` per request

Observers only read. Times are `time.monotonic` seconds, which processes of one machine share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from girih.runtime.records.plans import SchedulerOutput, StepTimes
from girih.runtime.records.request import EngineOutput, EngineRequest


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step that ran.

    Attributes:
        plan: what was computed.
        outputs: what came of it.
        scheduled: when planning began; the next fields are later times in order.
        submitted: when the plan was made.
        started: when the runner took it up.
        ended: when the runner was done.
        received: when the scheduler took the result.
        updated: when its outputs were processed.
        times: the runner's own account, if it gives one.
        dispatch: how the model ran, in words.
    """

    plan: SchedulerOutput
    outputs: list[EngineOutput]
    scheduled: float
    submitted: float
    started: float
    ended: float
    received: float
    updated: float
    times: StepTimes | None
    dispatch: str = ""


class CoreObserver:
    """Is told what a core does, in the core's thread; subclasses override what they want."""

    def on_request(self, request: EngineRequest) -> None:
        """A request was taken in."""

    def on_step(self, report: StepReport) -> None:
        """The outputs of a step were processed."""

    def on_end(self, outputs: list[EngineOutput]) -> None:
        """Requests ended between steps (aborted, or failed with their step)."""

    def close(self) -> None:
        """The core ends."""


class RequestTimes:
    """The life of one request.

    Attributes:
        request: what was asked.
        arrived: when the front end took it in.
        scheduled: when the step began that first computed something of it; 0 before.
        first_token: when its first token was there; 0 before.
        last_token: when its latest token was there.
        num_tokens: output tokens so far.
        num_cached_tokens: prompt tokens from the prefix cache.
        num_preemptions: how often it lost its blocks.
        finish_reason: how it ended.
        ended: when.
    """

    __slots__ = (
        "arrived",
        "ended",
        "finish_reason",
        "first_token",
        "last_token",
        "num_cached_tokens",
        "num_preemptions",
        "num_tokens",
        "request",
        "scheduled",
    )

    def __init__(self, request: EngineRequest, now: float) -> None:
        self.request = request
        self.arrived = arrival_of(request, now)
        self.scheduled = self.first_token = self.last_token = self.ended = 0.0
        self.num_tokens = self.num_cached_tokens = self.num_preemptions = 0
        self.finish_reason: str | None = None


def arrival_of(request: EngineRequest, now: float | None = None) -> float:
    """When a front end took `request` in, on the clock of this machine; else `now`."""
    now = time.monotonic() if now is None else now
    # A caller without this clock leaves 0, or brings numbers that only order requests.
    is_recent = request.arrival_time > 0 and 0.0 < now - request.arrival_time < 3600.0
    return request.arrival_time if is_recent else now


class RequestClock:
    """Keeps `RequestTimes` of the unfinished requests."""

    def __init__(self) -> None:
        self._times: dict[str, RequestTimes] = {}

    def __len__(self) -> int:
        return len(self._times)

    def arrive(self, request: EngineRequest) -> None:
        """Begin with a request."""
        self._times[request.request_id] = RequestTimes(request, time.monotonic())

    def schedule(self, plan: SchedulerOutput, now: float) -> None:
        """Note which requests a plan begins with and which lost their blocks."""
        for new in plan.new_requests:
            times = self._times.get(new.request_id)
            if times is not None and not times.scheduled:
                times.scheduled = now
        for request_id in plan.preempted_ids:
            times = self._times.get(request_id)
            if times is not None:
                times.num_preemptions += 1

    def take_token(self, output: EngineOutput, now: float) -> tuple[RequestTimes, float] | None:
        """Note an output; returns the request and when its token before came (0: none did)."""
        times = self._times.get(output.request_id)
        if times is None:
            return None
        before = times.last_token
        if output.has_result:
            times.last_token = now
            times.first_token = times.first_token or now
            times.num_tokens += len(output.new_token_ids)
            times.num_cached_tokens = output.num_cached_tokens
        if output.finish_reason is not None:
            times.finish_reason, times.ended = output.finish_reason, now
            del self._times[output.request_id]
        return times, before
