"""A sweep: each point compiled and measured in fresh processes; rows, table, Pareto plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-m", "girih.serve.cli.main")


@dataclass(frozen=True)
class Point:
    """One measurement of a sweep.

    Attributes:
        words: what varies, e.g. ("opt=O1", "workloads=single").
        level: optimisation level.
        workload: name of the workload; "" when the point failed before one ran.
        compile_seconds: cold compile into an empty directory; 0.0 where nothing is compiled.
        ready_seconds: start of the engine from the bundle, in a new process.
        output_tok_s, total_tok_s: speed of the best round; 0.0 when it failed.
        error: last line of what went wrong, or None.
    """

    words: tuple[str, ...]
    level: str
    workload: str = ""
    compile_seconds: float = 0.0
    ready_seconds: float = 0.0
    output_tok_s: float = 0.0
    total_tok_s: float = 0.0
    error: str | None = None

    @property
    def start_seconds(self) -> float:
        """From nothing compiled to ready."""
        return self.compile_seconds + self.ready_seconds


@dataclass(frozen=True)
class SweepPlan:
    """A point as it is to be run.

    Attributes:
        varied: the words that vary between points.
        engine: every word of the engine.
        bench: every word of the measurement.
        level: optimisation level.
        compiles: whether the level has a bundle.
    """

    varied: tuple[str, ...]
    engine: tuple[str, ...]
    bench: tuple[str, ...]
    level: str
    compiles: bool


class SweepRunner:
    """Runs points one after the other; points of the same engine share one compile.

    Args:
        scratch: directory for bundles and compiler caches, empty at first.
        say: told what is going on.
    """

    def __init__(self, scratch: Path, say: Callable[[str], None]) -> None:
        self._scratch, self._say = scratch, say
        self._compiled: dict[tuple[str, ...], tuple[Path, float]] = {}

    def run(self, plan: SweepPlan) -> list[Point]:
        """Measure one point; a failure is a row too. One row per workload of the point."""
        self._say(f"{' '.join(plan.varied) or plan.level}")
        try:
            bundle, compile_seconds = self._bundle(plan)
            words = [*plan.engine, *plan.bench, *([f"bundle={bundle}"] if bundle else [])]
            output = self._girih("bench", "offline", *words)
        except RuntimeError as error:
            return [Point(plan.varied, plan.level, error=str(error))]
        ready, results = _read_output(output)
        return [
            Point(
                plan.varied,
                plan.level,
                row["workload"],
                round(compile_seconds, 2),
                ready,
                row["output_tok_s"],
                row["total_tok_s"],
            )
            for row in results
        ]

    def _bundle(self, plan: SweepPlan) -> tuple[Path | None, float]:
        if not plan.compiles:
            return None, 0.0
        if plan.engine not in self._compiled:
            path = self._scratch / f"bundle-{len(self._compiled)}"
            started = time.perf_counter()
            self._girih("compile", *plan.engine, f"bundle={path}", "compile.reuse=false")
            self._compiled[plan.engine] = path, time.perf_counter() - started
        return self._compiled[plan.engine]

    def _girih(self, *words: str) -> str:
        """Run a verb in a new process with empty compiler caches; returns what it printed."""
        caches = tempfile.mkdtemp(prefix="inductor-", dir=self._scratch)
        done = subprocess.run(
            [*COMMAND, *words, "-q"],
            capture_output=True,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": caches},
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise RuntimeError(lines[-1])
        return done.stdout


def _read_output(text: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds of the READY line, and the RESULT lines."""
    ready = 0.0
    results = []
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "READY":
            ready = float(rest)
        elif kind == "RESULT":
            results.append(json.loads(rest))
    return ready, results


def write_rows(points: Sequence[Point], path: Path) -> None:
    """Write one JSON line per point."""
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in points))


def table(points: Sequence[Point]) -> str:
    """The rows as Markdown."""
    lines = [
        "| point | workload | compile s | start s | output tok/s | all tok/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for p in points:
        name = " ".join(p.words) or p.level
        if p.error:
            lines.append(f"| {name} | failed: {p.error} | | | | |")
        else:
            lines.append(
                f"| {name} | {p.workload} | {p.compile_seconds:.1f} | {p.ready_seconds:.1f} "
                f"| {p.output_tok_s:.1f} | {p.total_tok_s:.1f} |"
            )
    return "\n".join(lines) + "\n"


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both start-up and speed, by rising start-up."""
    line: list[Point] = []
    for p in sorted(points, key=lambda p: (p.start_seconds, -p.output_tok_s)):
        if not line or p.output_tok_s > line[-1].output_tok_s:
            line.append(p)
    return line


def write_plot(points: Sequence[Point], path: Path, title: str) -> None:
    """Draw start-up seconds against tokens per second, one panel per workload."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(p.workload for p in points if p.error is None))
    figure = Figure(figsize=(5.2 * max(1, len(workloads)), 4.2), layout="constrained")
    for number, workload in enumerate(workloads, start=1):
        axes = figure.add_subplot(1, len(workloads), number)
        chosen = [p for p in points if p.workload == workload]
        best = pareto(chosen)
        latest = max(p.start_seconds for p in chosen if p.error is None)
        axes.plot(
            [p.start_seconds for p in best], [p.output_tok_s for p in best], "--", color="#12947f"
        )
        for p in chosen:
            axes.plot(p.start_seconds, p.output_tok_s, "o", color="#3867d6", markersize=8)
            is_right = p.start_seconds > latest / 2  # no room for words beside it
            axes.annotate(
                " ".join(w for w in p.words if not w.startswith("workloads=")) or p.level,
                (p.start_seconds, p.output_tok_s),
                xytext=(-8, -3) if is_right else (7, 4),
                ha="right" if is_right else "left",
                textcoords="offset points",
                fontsize=9,
            )
        axes.set(
            title=workload,
            xlabel="seconds from nothing compiled to ready",
            ylabel="output tokens per second",
        )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.15)
        axes.grid(alpha=0.25)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
