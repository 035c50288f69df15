"""`girih simulate`: the engine's scheduler under a load, on a clock of its own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from girih.conf.compose import compose_config
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.records import to_record
from girih.runtime.records.config import CacheConfig, SchedulerConfig
from girih.serve.bench.config import DatasetConfig, LoadConfig, ReportConfig, SloConfig
from girih.serve.bench.records import RequestRecord
from girih.serve.bench.report import as_table, write_json
from girih.serve.cli.preflight import require_writable
from girih.serve.cli.verbs import Options
from girih.serve.progress import LoadBar
from girih.serve.twin.config import SimulateConfig
from girih.serve.twin.cost import FitError, load_cost
from girih.serve.twin.requests import due_requests
from girih.serve.twin.simulation import Simulation, TwinSettings


def run(words: list[str], options: Options) -> int:
    """Simulate, print the table, write the files; 1 when no request was answered."""
    config = compose_config("simulate", words)
    simulate = to_record(SimulateConfig, config["simulate"])
    dataset = to_record(DatasetConfig, config["dataset"])
    load = to_record(LoadConfig, config["load"])
    report = to_record(ReportConfig, config["report"])
    if report.plots:
        raise ConfigError("report.plots draws what `girih bench serve` measured; unset it here")
    require_writable("report.json", report.json)
    settings = TwinSettings(
        simulate,
        to_record(SchedulerConfig, config["scheduler"]),
        to_record(CacheConfig, config["cache"]),
        load_cost(simulate.cost),
    )
    slo = to_record(SloConfig, config["slo"])
    total, requests = due_requests(dataset, load)
    with LoadBar(total, options.quiet) as bar, _records(report.records) as write:
        simulation = Simulation(settings, load, slo, write, bar)
        simulation.run(requests, total)
    summary = simulation.summary(report.percentiles)
    print(as_table(summary) + "\n\n" + _engines(summary, settings.cost.error))
    if report.json:
        write_json(report.json, summary, config)
    return 0 if summary["completed"] else 1


@contextlib.contextmanager
def _records(file: str | None) -> Iterator[Callable[[RequestRecord], None]]:
    """Give something that writes a record as soon as its request ended."""
    if file is None:
        yield lambda record: None
        return
    try:
        Path(file).write_text("")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from error
    with Path(file).open("a", encoding="utf-8") as lines:
        yield lambda record: print(json.dumps(record.as_line()), file=lines)


def _engines(summary: dict[str, Any], error: FitError) -> str:
    engines, wall = summary["engines"], max(summary["wall_seconds"], 1e-9)
    num_ended = summary["completed"] + summary["failed"]
    rows = (
        (
            "engines",
            f"{engines['replicas']}, busy {engines['busy']:.1%}, {engines['steps']} steps of "
            f"{engines['tokens_per_step']:.1f} tokens",
        ),
        (
            "KV cache",
            f"{engines['preemptions']} preemptions, {engines['cache_hit_rate']:.1%} of the prompt "
            f"tokens found, {engines['evictions']} evictions, at most "
            f"{engines['peak_kv_usage']:.1%} in use",
        ),
        ("simulated", f"in {wall:.2f} s, {num_ended / wall:.0f} requests/s"),
        (
            "step cost",
            f"fitted to {error.steps} steps, off by {error.median:.1%} (median), {error.p90:.1%} "
            f"(p90), {error.total:+.1%} (all together)",
        ),
    )
    return "\n".join(f"{name:<13}{text}" for name, text in rows)
