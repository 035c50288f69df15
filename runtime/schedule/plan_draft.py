"""A step's plan while it is made, and what is kept of it until its result comes. No torch."""

from __future__ import annotations

from typing import NamedTuple

from girih.runtime.records.plans import NewRequest, RunningUpdate, SchedulerOutput
from girih.runtime.records.request import Request


class PlannedTokens(NamedTuple):
    """A request's part of one plan: positions [start, end), sampled from if `samples`."""

    request: Request
    epoch: int
    start: int
    end: int
    samples: bool


class PlanInFlight(NamedTuple):
    """A plan whose result has not come yet."""

    plan: SchedulerOutput
    parts: list[PlannedTokens]


class PlanDraft:
    """A plan while it is made; a victim's part can still be taken out."""

    __slots__ = ("budget", "has_preempted", "new_requests", "parts", "prompt_budget", "updates")

    def __init__(self, budget: int, prompt_budget: int) -> None:
        self.budget = budget
        self.prompt_budget = prompt_budget
        self.has_preempted = False
        self.parts: dict[str, PlannedTokens] = {}
        self.updates: dict[str, RunningUpdate] = {}
        self.new_requests: list[NewRequest] = []

    def add(self, request: Request, num_tokens: int) -> None:
        """Plan the next `num_tokens` tokens of `request` and advance it."""
        start = request.num_computed_tokens
        end = request.num_computed_tokens = start + num_tokens
        samples = end == len(request.token_ids) + request.num_placeholders
        if samples:
            request.num_placeholders += 1
        self.budget -= num_tokens
        if num_tokens > 1:
            self.prompt_budget -= num_tokens
        self.parts[request.request_id] = PlannedTokens(request, request.epoch, start, end, samples)

    def take_out(self, request: Request) -> None:
        """Give back the tokens of a victim that was already planned (only running ones are)."""
        part = self.parts.pop(request.request_id, None)
        if part is not None:
            num_tokens = part.end - part.start
            self.budget += num_tokens
            if num_tokens > 1:
                self.prompt_budget += num_tokens
            del self.updates[request.request_id]
