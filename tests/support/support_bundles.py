"""Bundles of a few bytes, sealed like real ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from girih.graph.bundle.bundle import seal
from girih.graph.bundle.files import MANIFEST, BundleKey, tile_graph, tile_package
from girih.graph.ir.program import ProgramLayout, TileStep

LAYOUT = ProgramLayout((TileStep("t0", 0, (0,), (1,)),), {"ids": 0}, {}, 2, 1)


def small_bundle(
    directory: Path, key: BundleKey, size: int = 1000, used_ago: float = 0.0, model: str = "tiny"
) -> Path:
    """Put a bundle of about `size` bytes into a cache; `used_ago` is in seconds."""
    path = directory / key.digest
    (path / "tiles").mkdir(parents=True)
    tile_package(path, "t0").write_bytes(b"x" * size)
    tile_graph(path, "t0").write_text("{}")
    (path / "kernels.so").write_bytes(b"library")
    save_file({"rope": torch.arange(4.0)}, path / "constants.safetensors")
    rest = {"weights": [], "notes": {}, "report": "", "seconds": {}}
    seal(path, key, {"model": model, "layout": LAYOUT.to_json(), **rest})
    moment = time.time() - used_ago
    os.utime(path / MANIFEST, (moment, moment))
    return path
