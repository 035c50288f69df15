"""The C++ library of the kernel tests (`support_library`), and their tolerances.

GIRIH_TEST_ISA=avx512 builds for that instruction set, as 16-lane code lowered to AVX2 where this
machine lacks it; a test runs the op tests that way in a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support_library import build_cached

from girih.kernels.base.target import detect_isa, why_not_runnable
from girih.kernels.build import library

LANES_16 = ("-UGIRIH_LANES", "-DGIRIH_LANES=16")


@dataclass(frozen=True)
class Built:
    path: Path
    isa: str  # whose packed layout the library reads


@pytest.fixture(scope="session")
def built() -> Built:
    """Build and load the library for this machine; the ops are C++ from here on."""
    isa = os.environ.get("GIRIH_TEST_ISA", detect_isa())
    if why_not_runnable(isa):
        path = build_cached("lanes16", detect_isa(), LANES_16)
    else:
        path = build_cached(isa, isa)
    library.load_library(path)
    return Built(path, isa)


# Absolute errors of outputs of order 1, float32 accumulation on both sides.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(params=list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(1)
    return request.param


@pytest.fixture
def tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE[dtype]
