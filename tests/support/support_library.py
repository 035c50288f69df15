"""The C++ kernel library, built once for all tests: kept in the temporary directory by digest."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import filelock
import pytest
import torch

from girih.kernels.build import library
from girih.kernels.build import sources as library_sources
from girih.passes.build import build


def build_cached(name: str, isa: str, flags: tuple[str, ...] = ()) -> Path:
    """The library as `build_library` makes it; built when it is not there."""
    folder = Path(tempfile.gettempdir()) / f"girih-test-kernels-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{library_sources.source_digest()[:24]}-{torch.__version__}.so"
    with filelock.FileLock(f"{path}.lock"):
        if not path.exists():
            library.build_library(isa, path, flags)
    return path


def share_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bundles made in this process take that library instead of building one each (15 s)."""

    def copy(isa: str, path: Path) -> Path:
        return Path(shutil.copyfile(build_cached(isa, isa), path))

    monkeypatch.setattr(build, "build_library", copy)
