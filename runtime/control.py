"""What can be asked of a core besides requests, by name (the methods of `Call`).

Every method takes keyword arguments and returns something msgspec can encode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from girih.kernels.errors import EngineError, QueueFullError, RequestError
from girih.runtime.engine import EngineCore
from girih.runtime.metrics import EngineMetrics

Method = Callable[..., Any]


def call_method(core: EngineCore, method: str, arguments: dict[str, Any]) -> Any:
    """Do what `method` says.

    Raises:
        RequestError: no such method.
        TypeError: it does not take these arguments.
        GirihError: it failed.
    """
    chosen = METHODS.get(method)
    if chosen is None:
        raise RequestError(f"the engine has no method {method!r}; it has {', '.join(METHODS)}")
    return chosen(core, **arguments)


def note_refusal(core: EngineCore, error: QueueFullError) -> None:
    """Count a request that was refused because queues are full."""
    for observer in core.observers:
        if isinstance(observer, EngineMetrics):
            observer.note_refusal(error.reason)


def _metrics(core: EngineCore, http: list[tuple[str, str, int, float]]) -> str:
    """Take in what a front end saw and return all metrics as text."""
    for observer in core.observers:
        if isinstance(observer, EngineMetrics):
            observer.note_http(http)
            return observer.text()
    raise EngineError("this engine keeps no metrics")


def _step_seconds(core: EngineCore) -> dict[str, float]:
    """Seconds spent in each part of the steps; without metrics the core's own three parts."""
    for observer in core.observers:
        if isinstance(observer, EngineMetrics):
            return observer.step_seconds
    stats = core.stats()
    return {
        "schedule": stats.schedule_seconds,
        "run": stats.run_seconds,
        "update": stats.update_seconds,
    }


METHODS: dict[str, Method] = {
    "stats": EngineCore.stats,
    "metrics": _metrics,
    "step_seconds": _step_seconds,
    "check_integrity": EngineCore.check_integrity,
    "reset_prefix_cache": EngineCore.reset_prefix_cache,
    "pause": EngineCore.pause,
    "resume": EngineCore.resume,
}
