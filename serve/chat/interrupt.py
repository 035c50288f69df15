"""Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopOnInterrupt:
    """While entered, SIGINT asks the answer to stop.

    Args:
        at_once: raise KeyboardInterrupt right away; else set `requested` and raise only when the
            key is pressed again.
    """

    def __init__(self, at_once: bool) -> None:
        self.requested = False
        self._at_once = at_once
        self._before: Any = None

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._at_once or self.requested:
            raise KeyboardInterrupt
        self.requested = True
