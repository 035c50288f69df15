"""Which grammar library serves which request. Libraries are imported when first needed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, cast

import msgspec

from girih.kernels.base.errors import RequestError
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.cycles import find_cycle
from girih.runtime.structured.deep_threads import DeepThreads
from girih.runtime.structured.tag_grammar import schemas_of

if TYPE_CHECKING:
    from girih.runtime.structured.backend import BackendModule

ORDER = ("llguidance", "xgrammar")
"""Libraries in the order "auto" asks them."""
CHECK_THREADS = 2


@functools.cache
def is_installed(name: str) -> bool:
    """Return whether a grammar library can be imported."""
    return importlib.util.find_spec(name) is not None


def load(name: str) -> BackendModule:
    """Import girih's module for a grammar library."""
    module = importlib.import_module(f"girih.runtime.structured.{name}_backend")
    return cast("BackendModule", module)


def choose(structured: StructuredOutput) -> str:
    """The library that serves a request.

    Raises:
        RequestError: none can; says why not.
    """
    if structured.backend != "auto":
        if not is_installed(structured.backend):
            raise structured.error(f"the backend {structured.backend!r} is not installed")
        refused = load(structured.backend).why_not(structured)
        if refused is not None:
            raise structured.error(refused)
        return structured.backend
    reasons = []
    for name in filter(is_installed, ORDER):
        refused = load(name).why_not(structured)
        if refused is None:
            return name
        reasons.append(refused)
    raise structured.error("; ".join(reasons) or "no grammar library is installed")


def check(structured: StructuredOutput) -> None:
    """Ask the library whether it can serve a request (milliseconds; no vocabulary needed).

    Raises:
        RequestError: it cannot; says what is wrong and where.
    """
    fault = _threads().submit(_fault, cache_key(structured)).result()
    if fault is not None:
        raise RequestError(fault.replace("structured", structured.param, 1), structured.param)


def cache_key(structured: StructuredOutput) -> StructuredOutput:
    """The record without where it came from: equal keys mean equal grammars."""
    return msgspec.structs.replace(structured, param="structured")


@functools.cache
def _threads() -> DeepThreads:
    return DeepThreads(CHECK_THREADS, "girih-check")


@functools.lru_cache(maxsize=256)
def _fault(structured: StructuredOutput) -> str | None:
    try:
        _refuse_cycles(structured)
        load(choose(structured)).check(structured)
    except RequestError as error:
        return str(error)
    except RecursionError:
        return str(structured.error(f"the {structured.kind} has too many references in a row"))
    return None


def _refuse_cycles(structured: StructuredOutput) -> None:
    for place, schema in schemas_of(structured):
        if cycle := find_cycle(schema):
            where = f", at {place}" if place else ""
            raise structured.error(
                f"the schema cannot be used{where}: no finite text satisfies "
                f"{' -> '.join(cycle)[:300]}; give the circle a way out, like an optional property "
                "or another option in anyOf"
            )
