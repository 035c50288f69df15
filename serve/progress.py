"""Draws progress on stderr: bars on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from girih.kernels.base.progress import ProgressEvent

if TYPE_CHECKING:
    from girih.serve.bench.load import LoadState


class ProgressDisplay:
    """An observer for the stages; use it as a context manager and call it with events.

    Args:
        quiet: draw nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._console = Console(file=sys.stderr)
        self._live = not quiet and self._console.is_terminal
        self._bar: Progress | None = None
        self._tasks: dict[str, Any] = {}
        self._stage = ""
        self._stage_started = 0.0

    def __call__(self, event: ProgressEvent) -> None:
        """Show one event."""
        if self._live:
            self._draw(event)
        elif not self._quiet:
            self._print(event)

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stage = ""  # it was not done
        self.close()

    def close(self) -> None:
        """Remove the bars, or end the last stage's line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks = {}
        self._end_stage()

    def _draw(self, event: ProgressEvent) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn("{task.description:<9}"),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        if event.stage not in self._tasks:
            for task in self._bar.tasks:  # what has no end of its own ends where the next begins
                if task.total is None:
                    self._bar.update(task.id, completed=1, total=1)
            self._tasks[event.stage] = self._bar.add_task(event.stage, total=event.total, detail="")
        self._bar.update(
            self._tasks[event.stage],
            completed=event.done,
            total=event.total,
            detail=event.detail[-48:],
        )

    def _print(self, event: ProgressEvent) -> None:
        if event.stage != self._stage:
            self._end_stage()
            self._stage, self._stage_started = event.stage, time.monotonic()
            print(f"{event.stage}: {event.detail or '…'}", file=sys.stderr, flush=True)

    def _end_stage(self) -> None:
        if self._stage:
            seconds = time.monotonic() - self._stage_started
            print(f"{self._stage}: done in {seconds:.1f} s", file=sys.stderr, flush=True)
        self._stage = ""


def finished_bar(total: int, what: str = "prompts") -> Progress:
    """Return a bar that counts finished prompts (or `what` it is) on stderr."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    bar.add_task(what, total=total)
    return bar


class LoadBar:
    """Draws how far a load run is; use it as a context manager and call it with its states.

    Args:
        total: requests in all.
        quiet: draw nothing.
    """

    def __init__(self, total: int, quiet: bool = False) -> None:
        console = Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task = self._bar.add_task("requests", total=total, detail="")

    def __enter__(self) -> LoadBar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, state: LoadState) -> None:
        """Show one state."""
        rate = state.output_tokens / state.seconds if state.seconds > 0 else 0.0
        failed = f", {state.failed} failed" if state.failed else ""
        detail = f"{state.running} running{failed}, {rate:.0f} tokens/s"
        self._bar.update(self._task, completed=state.done, detail=detail)
