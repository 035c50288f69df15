"""What the core's process runs to make its engine (imports little, so that it starts quickly)."""

from __future__ import annotations

from girih.graph.progress import Progress
from girih.runtime.config import EngineConfig
from girih.runtime.core_process import BuiltEngine
from girih.serve.logs import LogSettings


def build_core(config: EngineConfig, logs: LogSettings, progress: Progress) -> BuiltEngine:
    """Set up logging and build the engine that `config` describes."""
    logs.apply()
    from girih.runtime.launch import build_engine

    return build_engine(config, progress)
