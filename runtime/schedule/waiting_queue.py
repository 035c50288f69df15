"""Requests that wait for admission, in the order of the policy. No torch."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from typing import Protocol

from girih.kernels.base.errors import ConfigError
from girih.runtime.records.request import Request


class WaitingQueue(Protocol):
    """Order in which waiting requests are admitted."""

    def __len__(self) -> int: ...

    def add(self, request: Request) -> None:
        """Queue a request that arrived."""
        ...

    def add_preempted(self, request: Request) -> None:
        """Queue a request that lost its blocks."""
        ...

    def peek(self) -> Request:
        """The next one to admit; the queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take out `request`, admitted or aborted."""
        ...


class FcfsQueue:
    """First come, first served; a preempted request goes to the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue at the tail."""
        self._requests[request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        """Queue at the head."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The head."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take out `request` in O(1)."""
        del self._requests[request.request_id]


class PriorityQueue:
    """Lower priority number first, then arrival; a preempted request keeps its place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Queue by `Request.sort_key`."""
        bisect.insort(self._requests, request, key=Request.sort_key)

    def add_preempted(self, request: Request) -> None:
        """Queue by `Request.sort_key`."""
        self.add(request)

    def peek(self) -> Request:
        """The one with the smallest key."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take out `request` (keys are unique, so a binary search finds it)."""
        index = bisect.bisect_left(self._requests, request.sort_key(), key=Request.sort_key)
        del self._requests[index]


def make_waiting_queue(policy: str) -> WaitingQueue:
    """The queue of a scheduling policy, "fcfs" or "priority"."""
    if policy == "fcfs":
        return FcfsQueue()
    if policy == "priority":
        return PriorityQueue()
    raise ConfigError(f"scheduler.policy is {policy!r}; it must be 'fcfs' or 'priority'")
