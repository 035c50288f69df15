"""Progress of long work, as events: stages report, the command line draws.

Owns nothing. A stage takes `progress: Progress = no_progress` and calls it; it never prints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ProgressEvent:
    """One report of long work.

    Attributes:
        stage: "start" | "download" | "convert" | "model" | "trace" | "lower" | "compile" |
            "kernels" | "verify" | "weights". "model" says that its files are there.
        done: units finished so far.
        total: units in all, or None when unknown.
        detail: what is being worked on, e.g. "tile 2 of 3" or a parameter's name.
        model_path: directory of the model's files, in "model" events.
    """

    stage: str
    done: int
    total: int | None
    detail: str = ""
    model_path: str = ""


Progress = Callable[[ProgressEvent], None]


def no_progress(event: ProgressEvent) -> None:
    """Ignore the event (the default observer)."""
