"""Builds a serving engine and has it watched (a core's process starts here: few imports)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from girih.kernels.base.progress import Progress
from girih.runtime.records.config import EngineConfig
from girih.serve.logs import LogSettings

if TYPE_CHECKING:
    from girih.runtime.start.launch import Engine


def build_core(
    config: EngineConfig, logs: LogSettings, progress: Progress, otlp_endpoint: str | None = None
) -> Engine:
    """Set up logging, build the engine that `config` describes, and watch it."""
    logs.apply()
    return build_watched(config, progress, otlp_endpoint)


def build_watched(
    config: EngineConfig, progress: Progress, otlp_endpoint: str | None = None
) -> Engine:
    """Build an engine that keeps metrics, logs its status, and sends spans to a receiver."""
    from girih.runtime.observe.metrics import EngineMetrics
    from girih.runtime.observe.status_line import StatusLine
    from girih.runtime.start.launch import build_engine

    engine = build_engine(config, progress)
    core, facts, report = engine.core, engine.facts, engine.report
    metrics = EngineMetrics(core, facts.name, facts.max_model_len)
    seconds = {f"start_{k.replace(' ', '_')}_seconds": v for k, v in report.seconds.items()}
    bundle = report.bundle
    metrics.set_facts(seconds, bundle=bundle.status, reason=bundle.reason, key=facts.key)
    core.observers.append(metrics)
    if config.runtime.status_seconds:
        core.observers.append(StatusLine(core, config.runtime.status_seconds))
    if otlp_endpoint is not None:
        from girih.serve.engine.spans import make_spans

        core.observers.append(make_spans(otlp_endpoint, facts.name))
    return engine
