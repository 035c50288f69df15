"""Every error girih raises on purpose, in one tree.

    GirihError
    ├── ConfigError      a setting has a value it may not have
    ├── SourceError      a model could not be found or read
    │   └── WeightError  a checkpoint misses a tensor, or is damaged
    ├── TraceError       a module could not be captured as a graph
    ├── PassError        a compiler pass broke its contract
    ├── CompileError     a tile or the kernel library could not be built
    ├── BundleError      a bundle is damaged, or was built for something else
    ├── CapacityError    memory does not suffice for what was asked
    ├── RequestError     a request cannot be served as it stands (HTTP 4xx)
    ├── BusyError        something cannot be done while something else runs (HTTP 409)
    └── EngineError      the engine died or refused work (HTTP 5xx)
        ├── UnavailableError  it takes no requests for a while: asleep, loading weights (HTTP 503)
        └── QueueFullError    too many requests wait (HTTP 429)

A message says what failed, the value seen, what is allowed, and what to do. This module lives in
the lowest layer so that every folder can raise from the same tree; users import from `girih`.
"""

from __future__ import annotations


class GirihError(Exception):
    """Base of every error that girih raises on purpose."""


class ConfigError(GirihError):
    """A setting has a value it may not have."""


class SourceError(GirihError):
    """A model source is missing, unreadable or of an unknown kind."""


class WeightError(SourceError):
    """A checkpoint misses a tensor, holds one of the wrong shape, or is damaged."""


class TraceError(GirihError):
    """A module could not be captured as a graph."""


class PassError(GirihError):
    """A compiler pass broke its contract (names the pass and the node)."""


class CompileError(GirihError):
    """A tile or the kernel library could not be built."""


class BundleError(GirihError):
    """A bundle is damaged or was built for another machine or version."""


class CapacityError(GirihError):
    """Memory does not suffice for what was asked."""


TOO_LONG = "context_length_exceeded"
"""Code of a request whose prompt does not fit the model, as OpenAI spells it."""


class RequestError(GirihError):
    """A request cannot be served as it stands.

    Args:
        message: what is wrong, the value seen and what is allowed.
        param: the request field at fault, as the client spelled it.
        code: a short machine-readable word, where clients look for one.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class BusyError(GirihError):
    """Something cannot be done while something else runs."""


class EngineError(GirihError):
    """The engine died, or cannot take work now."""


class UnavailableError(EngineError):
    """The engine takes no requests now; the same request may be tried again later."""


class QueueFullError(EngineError):
    """Too many requests wait already; the same request may be tried again later.

    Args:
        message: what is full, and how full.
        reason: the limit that was met, for counting.
    """

    def __init__(self, message: str, reason: str = "max_num_waiting") -> None:
        super().__init__(message)
        self.reason = reason
