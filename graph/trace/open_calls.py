"""Where tracing stopped: the modules whose calls were open, and the line of their code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from girih.kernels.base.errors import TraceError


@dataclass(frozen=True)
class OpenCall:
    """A call of a module that did not return."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def open_calls(model: torch.nn.Module, run: Callable[[], object]) -> list[OpenCall]:
    """The calls that are open when `run` fails, innermost first, the model's own left out."""
    calls: list[OpenCall] = []

    def enter(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is model:
            calls.clear()
        calls.append(OpenCall(module, args, kwargs))

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        while calls and calls.pop().module is not module:
            pass

    hooks: list[Any] = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        hooks.append(module.register_forward_hook(leave))
    try:
        run()
    except TraceError:
        return calls[:0:-1]
    finally:
        for hook in hooks:
            hook.remove()
    return []


def source_line(error: BaseException, module: torch.nn.Module) -> str:
    """File and line of a module's code that tracing stopped at, else where its code begins."""
    found = None
    cause: BaseException | None = error
    while cause is not None:
        found = _own_frame(cause.__traceback__, module) or found
        cause = cause.__cause__ or cause.__context__
    if found is None:
        forward = inspect.unwrap(type(module).forward).__code__
        found = (forward.co_filename, forward.co_firstlineno)
    return f"{Path(found[0]).name}:{found[1]}"


def _own_frame(trace_back: TracebackType | None, module: torch.nn.Module) -> tuple[str, int] | None:
    found = None
    while trace_back is not None:
        frame = trace_back.tb_frame
        own = frame.f_locals.get("self") is module
        if own and not frame.f_code.co_filename.endswith("torch/nn/modules/module.py"):
            found = (frame.f_code.co_filename, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found
