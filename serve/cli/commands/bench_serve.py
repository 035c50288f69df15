"""`girih bench serve`: timed requests against an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

from girih.conf.compose import compose_config
from girih.kernels.base.records import to_record
from girih.serve.bench.config import (
    DatasetConfig,
    EndpointConfig,
    LoadConfig,
    ReportConfig,
    SloConfig,
)
from girih.serve.bench.datasets import make_requests
from girih.serve.bench.load import Measurement, run_load
from girih.serve.bench.metrics import summarize
from girih.serve.bench.plots import require_matplotlib, write_plots
from girih.serve.bench.report import as_table, write_json, write_records
from girih.serve.cli.preflight import make_folder, require_writable
from girih.serve.cli.verbs import Options
from girih.serve.progress import LoadBar


def run(words: list[str], options: Options) -> int:
    """Measure, print the table, write the files; 1 when no request succeeded."""
    config = compose_config("bench serve", words)
    endpoint = to_record(EndpointConfig, config["endpoint"])
    dataset = to_record(DatasetConfig, config["dataset"])
    load = to_record(LoadConfig, config["load"])
    slo = to_record(SloConfig, config["slo"])
    report = to_record(ReportConfig, config["report"])
    require_writable("report.json", report.json)
    require_writable("report.records", report.records)
    if report.plots:
        require_matplotlib()
        make_folder("report.plots", report.plots)
    requests = make_requests(dataset, as_text=endpoint.api == "chat")
    with LoadBar(len(requests), options.quiet) as bar:
        measurement = asyncio.run(run_load(endpoint, requests, load, dataset.seed, bar))
    summary = summarize(measurement, slo, report.percentiles)
    print(f"{measurement.model} at {endpoint.root}, {endpoint.api}\n\n{as_table(summary)}")
    _write_files(report, slo, measurement, summary, config)
    return 0 if summary["completed"] else 1


def _write_files(
    report: ReportConfig,
    slo: SloConfig,
    measurement: Measurement,
    summary: dict[str, Any],
    config: dict[str, Any],
) -> None:
    if report.json:
        write_json(report.json, summary, config)
    if report.records:
        write_records(report.records, measurement.records)
    if report.plots and summary["completed"]:
        title = f"{measurement.model}: {summary['completed']} requests"
        for path in write_plots(report.plots, measurement.records, slo, title):
            print(path)
