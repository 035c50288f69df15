"""Plots of a measurement: latencies, throughput over time, one bar per request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from girih.kernels.base.errors import ConfigError
from girih.serve.bench.config import SloConfig
from girih.serve.bench.metrics import (
    LATENCIES,
    concurrency_steps,
    latencies_ms,
    output_per_second,
)
from girih.serve.bench.records import RequestRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, BLUE, TEAL, AMBER, RED = "#24292f", "#3867d6", "#12947f", "#e0a030", "#c8452f"
MAX_BARS = 400  # more requests than this cannot be told apart
VISIBLE_SECONDS = 0.005


def require_matplotlib() -> None:
    """Check that plots can be drawn, before the measurement.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "report.plots needs matplotlib; install it with `pip install girih[plot]`"
        ) from error


def write_plots(
    folder: str, records: Sequence[RequestRecord], slo: SloConfig, title: str
) -> list[Path]:
    """Write `latency.png`, `throughput.png` and `requests.png`; returns their paths."""
    good = [record for record in records if record.error is None]
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    figures = {
        "latency": _latency(good, slo),
        "throughput": _throughput(good, records),
        "requests": _requests(records),
    }
    paths = []
    for name, figure in figures.items():
        figure.suptitle(title, fontsize=11, color=INK, x=0.01, ha="left")
        path = target / f"{name}.png"
        figure.savefig(path, dpi=130)
        paths.append(path)
    return paths


def _figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Any:
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _style(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def _latency(good: Sequence[RequestRecord], slo: SloConfig) -> Figure:
    """Share of requests that took at most so long, for each latency."""
    figure, grid = _figure(2, 2, (9, 6), sharey=True)
    values = latencies_ms(good)
    for axes, name in zip(grid.flat, ("ttft", "tpot", "itl", "e2e"), strict=True):
        ordered = sorted(values[name])
        if ordered:
            shares = [100 * place / len(ordered) for place in range(len(ordered) + 1)]
            axes.step([ordered[0], *ordered], shares, where="post", color=BLUE, linewidth=1.8)
        limit = slo.limits().get(name)
        if limit is not None:
            axes.axvline(limit, color=RED, linewidth=1, linestyle="--")
        axes.set_title(LATENCIES[name], fontsize=10)
        axes.set_ylim(0, 102)
        _style(axes, "ms", "% at most")
    return figure  # type: ignore[no-any-return]


def _throughput(good: Sequence[RequestRecord], records: Sequence[RequestRecord]) -> Figure:
    """Output tokens in each second, and requests under way."""
    figure, grid = _figure(2, 1, (9, 5), sharex=True)
    rates = output_per_second(good)
    upper, lower = grid[0][0], grid[1][0]
    upper.stairs(rates, color=TEAL, fill=True, alpha=0.35)
    upper.stairs(rates, color=TEAL, linewidth=1.5)
    upper.set_ylim(bottom=0)
    _style(upper, "", "output tokens/s")
    steps = concurrency_steps(records)
    lower.step([s for s, _ in steps], [n for _, n in steps], where="post", color=BLUE)
    _style(lower, "seconds", "requests under way")
    return figure  # type: ignore[no-any-return]


def _requests(records: Sequence[RequestRecord]) -> Figure:
    """One bar per request: waiting to be sent, to the first token, decoding, or failed."""
    figure, grid = _figure(1, 1, (9, 6))
    axes = grid[0][0]
    shown = sorted(records, key=lambda record: record.due)[:MAX_BARS]
    parts: dict[str, tuple[str, list[tuple[int, float, float]]]] = {
        "held back": ("#c9ced6", []),
        "to the first token": (AMBER, []),
        "decoding": (TEAL, []),
        "failed": (RED, []),
    }
    for row, record in enumerate(shown):
        first = record.pieces[0] if record.pieces else record.ended
        parts["held back"][1].append((row, record.due, record.sent))
        if record.error is not None:
            parts["failed"][1].append((row, record.sent, record.ended))
            continue
        parts["to the first token"][1].append((row, record.sent, first))
        parts["decoding"][1].append((row, first, record.ended))
    for name, (color, bars) in parts.items():
        if any(end - start > VISIBLE_SECONDS for _, start, end in bars):
            rows, starts, ends = zip(*bars, strict=True)
            widths = [end - start for start, end in zip(starts, ends, strict=True)]
            axes.barh(rows, widths, left=starts, height=0.85, color=color, label=name)
    axes.invert_yaxis()
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.06), ncols=4, frameon=False)
    _style(axes, "seconds", "request")
    return figure  # type: ignore[no-any-return]
