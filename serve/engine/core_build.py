"""How a serving engine is made: built, and watched (a core's process starts here: few imports)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from girih.kernels.base.progress import Progress
from girih.runtime.records.config import EngineConfig
from girih.serve.logs import LogSettings

if TYPE_CHECKING:
    from girih.runtime.start.launch import EngineHandle


def build_core(
    config: EngineConfig, logs: LogSettings, progress: Progress, otlp_endpoint: str | None = None
) -> EngineHandle:
    """Set up logging, build the engine that `config` describes, and watch it."""
    logs.apply()
    return build_watched(config, progress, otlp_endpoint)


def build_watched(
    config: EngineConfig, progress: Progress, otlp_endpoint: str | None = None
) -> EngineHandle:
    """Build an engine that keeps metrics, logs its status, and sends spans to a receiver."""
    from girih.runtime.observe.metrics import EngineMetrics
    from girih.runtime.observe.status_line import StatusLine
    from girih.runtime.start.launch import build_engine

    handle = build_engine(config, progress)
    core = handle.core
    metrics = EngineMetrics(core, handle.name, handle.max_model_len)
    result, _, reason = handle.report.bundle.partition(": ")
    seconds = {f"start_{k.replace(' ', '_')}_seconds": v for k, v in handle.report.seconds.items()}
    metrics.set_facts(seconds, bundle=result, reason=reason, key=handle.key)
    core.observers.append(metrics)
    if config.runtime.status_seconds:
        core.observers.append(StatusLine(core, config.runtime.status_seconds))
    if otlp_endpoint is not None:
        from girih.serve.engine.spans import make_spans

        core.observers.append(make_spans(otlp_endpoint, handle.name))
    return handle
