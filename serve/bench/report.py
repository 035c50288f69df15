"""The figures as a table, as JSON, and the records as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from girih.kernels.base.errors import ConfigError
from girih.serve.bench.metrics import LATENCIES
from girih.serve.bench.records import RequestRecord


def as_table(summary: dict[str, Any]) -> str:
    """Return the summary as text."""
    ended = "interrupted after" if summary["interrupted"] else "in"
    rows = [
        (
            "requests",
            f"{summary['completed']} completed, {summary['failed']} failed {ended} "
            f"{summary['seconds']:.2f} s",
        ),
        (
            "throughput",
            f"{summary['request_throughput']:.2f} requests/s, "
            f"{summary['output_throughput']:.1f} output tokens/s "
            f"(best second {summary['peak_output_throughput']:.0f}), "
            f"{summary['total_throughput']:.1f} tokens/s in all",
        ),
        (
            "tokens",
            f"{summary['input_tokens']} in ({summary['cached_tokens']} from the server's cache), "
            f"{summary['output_tokens']} out, counted by the {_counter(summary)}",
        ),
        ("concurrency", f"at most {summary['peak_concurrency']}"),
    ]
    if "goodput" in summary:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in summary["slo_ms"].items())
        rows.append(
            (
                "goodput",
                f"{summary['goodput']:.2f} requests/s ({summary['slo_kept']} with {limits})",
            )
        )
    lines = [f"{name:<13}{text}" for name, text in rows]
    lines += ["", *_latency_lines(summary["latency_ms"])]
    lines += [f"error ×{count}: {message}" for message, count in summary["errors"].items()]
    return "\n".join(lines)


def _counter(summary: dict[str, Any]) -> str:
    by_pieces = summary["output_counted_by"] == "pieces"
    return "pieces received (the server reports no usage)" if by_pieces else "server"


def _latency_lines(latency: dict[str, dict[str, float] | None]) -> list[str]:
    described = {name: figures for name, figures in latency.items() if figures}
    if not described:
        return []
    columns = list(next(iter(described.values())))
    lines = ["ms".ljust(22) + "".join(name.rjust(10) for name in columns)]
    for name, figures in described.items():
        cells = "".join(_number(figures[column]).rjust(10) for column in columns)
        lines.append(LATENCIES[name].ljust(22) + cells)
    return lines


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.2f}"


def write_json(file: str, summary: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write figures and settings.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(file, json.dumps({**summary, "settings": _plain(settings)}, indent=2) + "\n")


def write_records(file: str, records: Sequence[RequestRecord]) -> None:
    """Write one JSON line per request.

    Raises:
        ConfigError: the file cannot be written.
    """
    _write(file, "".join(json.dumps(record.as_line()) + "\n" for record in records))


def _plain(value: Any) -> Any:
    """Return settings that JSON can hold: no infinity, no key."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if name != "api_key"}
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
