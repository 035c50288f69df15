"""Bundles: everything a start needs, in one directory that can be copied to another machine.

    key.json              the named entries the bundle was built from
    program.json          steps, weight plan, tile notes, pass report
    tiles/KEY.pt2         compiled tile       tiles/KEY.json   its graph
    constants.safetensors buffers no checkpoint holds
    kernels.so            the kernel library
    manifest.json         SHA-256 of every file; written last

A bundle is found by its key and trusted by its manifest. Weights are not in it: a fine-tune of the
same architecture uses the same bundle.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from girih.graph.program import ProgramLayout
from girih.graph.weight_plan import WeightPlan
from girih.kernels.errors import BundleError

MANIFEST = "manifest.json"
PREPARED = "prepared.json"
"""Stands in a directory of what was built for another machine, in place of a manifest."""
_REQUIRED = {"key.json", "program.json", "constants.safetensors", "kernels.so"}


@dataclass(frozen=True)
class BundleKey:
    """What a bundle depends on, as an ordered list of (name, value)."""

    entries: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        """Hash of the entries: the bundle's name in the cache."""
        text = json.dumps(self.entries)
        return hashlib.sha256(text.encode()).hexdigest()[:20]

    def differences(self, other: BundleKey) -> list[str]:
        """Entries in which `other` differs, as "name: mine → other's"."""
        mine, others = dict(self.entries), dict(other.entries)
        names = [*mine, *(n for n in others if n not in mine)]
        return [
            f"{n}: {mine.get(n, '(absent)')} → {others.get(n, '(absent)')}"
            for n in names
            if mine.get(n) != others.get(n)
        ]

    def as_text(self) -> str:
        """The digest and every entry."""
        return f"key {self.digest}\n" + "".join(f"  {n} = {v}\n" for n, v in self.entries)


@dataclass(frozen=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: its directory.
        key: what it was built from.
        layout: steps and wiring.
        weights: the weight plan.
        constants: values of constant entries.
        notes: what each tile computes, by tile key.
        report: the pass table at build time.
        seconds: build seconds per stage.
        proof: what the build proved (`opt.verify`): {"passes": {NAME: RMSE}, "tiles": {KEY: RMSE},
            "note": text}; None when it was built without.
    """

    path: Path
    key: BundleKey
    layout: ProgramLayout
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    notes: dict[str, str]
    report: str
    seconds: dict[str, float]
    proof: dict[str, Any] | None = None

    def package(self, tile: str) -> Path:
        """File of a compiled tile."""
        return tile_package(self.path, tile)

    @property
    def library(self) -> Path:
        """File of the kernel library."""
        return self.path / "kernels.so"


def tile_package(path: Path, tile: str) -> Path:
    """Where a bundle keeps a compiled tile."""
    return path / "tiles" / f"{tile}.pt2"


def tile_graph(path: Path, tile: str) -> Path:
    """Where a bundle keeps a tile's graph."""
    return path / "tiles" / f"{tile}.json"


def seal(path: Path, key: BundleKey, program: dict[str, Any]) -> None:
    """Write the descriptions of a bundle whose other files are in place, the manifest last."""
    (path / "key.json").write_text(json.dumps(key.entries, indent=1))
    (path / "program.json").write_text(json.dumps(program))
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    sums = {str(p.relative_to(path)): _sha256(p) for p in files}
    (path / MANIFEST).write_text(json.dumps(sums, indent=1))


def open_bundle(path: Path) -> Bundle:
    """Open and check a bundle.

    Raises:
        BundleError: a file is missing, truncated or altered; names the file.
    """
    check_files(path)
    entries = json.loads((path / "key.json").read_text())
    program = json.loads((path / "program.json").read_text())
    return Bundle(
        path=path,
        key=BundleKey(tuple((n, v) for n, v in entries)),
        layout=ProgramLayout.from_json(program["layout"]),
        weights=WeightPlan.from_json(program["weights"]),
        constants=load_file(path / "constants.safetensors"),
        notes=program["notes"],
        report=program["report"],
        seconds=program["seconds"],
        proof=program.get("proof"),
    )


def read_key(path: Path) -> BundleKey | None:
    """The key of the bundle at `path`, or None when there is none that can be read."""
    try:
        entries = json.loads((path / "key.json").read_text())
        return BundleKey(tuple((str(n), str(v)) for n, v in entries))
    except (OSError, ValueError, TypeError):
        return None


def remove_bundle(path: Path) -> None:
    """Delete a bundle; the manifest goes first, so that a half-deleted one is never trusted."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def check_files(path: Path) -> None:
    """Hold every file of a bundle against its manifest.

    Raises:
        BundleError: a file is missing, truncated or altered; names the file.
    """
    try:
        sums = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise BundleError(f"bundle {path} has no readable {MANIFEST}: {error}") from error
    if not isinstance(sums, dict) or not _REQUIRED.issubset(sums):
        raise BundleError(f"bundle {path}: {MANIFEST} does not list {', '.join(sorted(_REQUIRED))}")
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise BundleError(f"bundle {path} misses {name}")
        found = _sha256(file)
        if found != expected:
            raise BundleError(
                f"bundle file {file} is damaged: SHA-256 {found[:12]}…, expected {expected[:12]}…"
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
