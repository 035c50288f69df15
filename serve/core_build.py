"""How a serving engine is made: built, and watched (a core's process starts here: few imports)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from girih.graph.progress import Progress
from girih.runtime.config import EngineConfig
from girih.serve.logs import LogSettings

if TYPE_CHECKING:
    from girih.runtime.launch import EngineHandle


def build_core(config: EngineConfig, logs: LogSettings, progress: Progress) -> EngineHandle:
    """Set up logging, build the engine that `config` describes, and watch it."""
    logs.apply()
    return build_watched(config, progress)


def build_watched(config: EngineConfig, progress: Progress) -> EngineHandle:
    """Build an engine that keeps metrics and logs its status."""
    from girih.runtime.launch import build_engine
    from girih.runtime.metrics import EngineMetrics
    from girih.runtime.status_line import StatusLine

    handle = build_engine(config, progress)
    core = handle.core
    metrics = EngineMetrics(core, handle.name, handle.max_model_len)
    result, _, reason = handle.report.bundle.partition(": ")
    seconds = {f"start_{k.replace(' ', '_')}_seconds": v for k, v in handle.report.seconds.items()}
    metrics.set_facts(seconds, bundle=result, reason=reason, key=handle.key)
    core.observers.append(metrics)
    if config.runtime.status_seconds:
        core.observers.append(StatusLine(core, config.runtime.status_seconds))
    return handle
