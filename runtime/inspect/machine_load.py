"""Measures the load that other processes put on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY_SHARE = 0.1
"""Of the processors: what others use without being worth a word."""


class OtherWork:
    """Processors that other processes keep busy, on average from here on.

    Args:
        stat: where Linux counts what each processor has done.

    Attributes:
        processors: what this process may run on.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.processors = len(self._usable) or os.cpu_count() or 1
        self._begun = time.perf_counter(), self._busy(), _own()

    def average(self) -> float | None:
        """Return the mean number of cores busy elsewhere; None where the system does not say."""
        began, busy_before, own_before = self._begun
        busy, seconds = self._busy(), time.perf_counter() - began
        if busy is None or busy_before is None or seconds <= 0:
            return None
        return max(0.0, (busy - busy_before - (_own() - own_before)) / seconds)

    def remark(self) -> str:
        """A sentence for people when it matters, else ""."""
        others = self.average()
        if others is None or others < BUSY_SHARE * self.processors:
            return ""
        return (
            f"Meanwhile other processes kept {others:.1f} of {self.processors} processors busy: "
            "an idle machine is faster."
        )

    def _busy(self) -> float | None:
        """Seconds that these processors have worked since the machine started."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        names = {f"cpu{number}" for number in self._usable}
        ticks = 0
        for line in lines:
            name, *counts = line.split()
            if name in names:
                user, nice, system, _idle, _wait, *interrupts = (int(c) for c in counts[:8])
                ticks += user + nice + system + sum(interrupts)
        return ticks / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
