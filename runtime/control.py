"""What can be asked of a core besides requests, by name (the methods of `Call`).

Every method takes keyword arguments and returns something msgspec can encode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from girih.kernels.errors import RequestError
from girih.runtime.engine import EngineCore

Method = Callable[..., Any]

METHODS: dict[str, Method] = {
    "stats": lambda core: core.stats(),
    "reset_prefix_cache": lambda core: core.reset_prefix_cache(),
    "check_integrity": lambda core: core.check_integrity(),
}


def call_method(core: EngineCore, method: str, arguments: dict[str, Any]) -> Any:
    """Do what `method` says.

    Raises:
        RequestError: no such method, or it does not take these arguments.
        GirihError: it failed.
    """
    chosen = METHODS.get(method)
    if chosen is None:
        raise RequestError(f"the engine has no method {method!r}; it has {', '.join(METHODS)}")
    return chosen(core, **arguments)
