"""Threads in which grammar libraries work: they recurse once for each rule that names another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Twice what the longest chain of rules took that a form has room for (only what is used is real).
STACK_BYTES = 256 * 1024 * 1024


class DeepThreads(ThreadPoolExecutor):
    """A pool of threads whose stack no form of a request can overflow."""

    _lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `ThreadPoolExecutor.submit`, which starts the threads."""
        with self._lock:
            before = threading.stack_size(STACK_BYTES)
            try:
                return super().submit(fn, *args, **kwargs)
            finally:
                threading.stack_size(before)
