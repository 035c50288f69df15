"""girih: a compile-first LLM inference engine.

Public names are loaded on first use, so that `import girih` (and `girih --help`) stays instant.
"""

from __future__ import annotations

import importlib
from typing import Any

from girih.kernels.base import openmp

__version__ = "0.1.0"

openmp.configure()

_PUBLIC = {
    "LLM": "girih.serve.offline.llm",
    "SamplingParams": "girih.runtime.records.sampling_params",
    "RequestOutput": "girih.serve.offline.outputs",
    "compile": "girih.runtime.start.launch",
    "load_spec": "girih.graph.files.spec",
    "trace": "girih.graph.trace.trace",
    "GirihError": "girih.kernels.base.errors",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'girih' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
