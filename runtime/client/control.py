"""Calls that a core answers besides requests, by name (the methods of `Call`).

Every method takes keyword arguments and returns something msgspec can encode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from girih.kernels.base.errors import EngineError, QueueFullError, RequestError
from girih.runtime.engine.core import EngineCore
from girih.runtime.engine.operations import OperationState
from girih.runtime.observe.metrics import EngineMetrics

if TYPE_CHECKING:
    from girih.runtime.observe.profiler import StepProfiler

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


def _sleep(core: EngineCore, level: int = 1, mode: str = "refuse") -> OperationState:
    return core.operations.sleep(level, mode)


def _wake(core: EngineCore) -> OperationState:
    return core.operations.wake()


def _reload(core: EngineCore, path: str | None = None, mode: str = "refuse") -> OperationState:
    return core.operations.reload_weights(path, mode)


def _operation(core: EngineCore) -> OperationState:
    return core.operations.state


def _profile_start(core: EngineCore) -> None:
    core.call_runner(_profiler(core).start)


def _profile_stop(core: EngineCore) -> str:
    return core.call_runner(_profiler(core).stop)


def _profiler(core: EngineCore) -> StepProfiler:
    if core.profiler is None:
        raise RequestError("this engine does not profile; start it with runtime.profile_dir=DIR")
    return core.profiler


METHODS: dict[str, Method] = {
    "stats": EngineCore.stats,
    "metrics": _metrics,
    "step_seconds": _step_seconds,
    "check_integrity": EngineCore.check_integrity,
    "reset_prefix_cache": EngineCore.reset_prefix_cache,
    "pause": EngineCore.pause,
    "resume": EngineCore.resume,
    "sleep": _sleep,
    "wake": _wake,
    "reload_weights": _reload,
    "operation": _operation,
    "profile_start": _profile_start,
    "profile_stop": _profile_stop,
}
