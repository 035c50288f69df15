"""How many inputs a comparison with transformers draws.

A plain run draws the same ones every time; GIRIH_CONFORMANCE_CASES=N draws N new ones each.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings

CASES = int(os.environ.get("GIRIH_CONFORMANCE_CASES", "0"))


def cases(usual: int) -> Callable[..., object]:
    """Settings of a property that is tried on `usual` inputs in a plain run."""
    return settings(
        max_examples=CASES or usual,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
