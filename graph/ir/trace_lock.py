"""Tracing, one thread of a process at a time.

While torch traces, it replaces functions of itself, of Python and of `nn.Module` for the whole
process. Two traces in threads end each other ("mode stack", "not tracked with proxy"), or change
what the other sees. The same holds for passes, whose operators run on fake tensors, and for
transformers' modules that run beside a trace.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

trace_lock = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function wait until no other thread traces, and keep others from it meanwhile."""

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with trace_lock:
            return function(*args, **kwargs)

    return alone
