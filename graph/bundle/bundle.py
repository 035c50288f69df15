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

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from girih.graph.bundle.files import (
    LIBRARY,
    MANIFEST,
    BundleHold,
    BundleKey,
    check_files,
    file_digest,
    tile_package,
)
from girih.graph.ir.program import ProgramLayout
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.ir.weight_plan import WeightPlan


@dataclass(frozen=True)
class BundleOrigin:
    """Where the code of a start comes from.

    Attributes:
        status: "found", "copied", "built", "building" (eager pieces answer meanwhile) or "none".
        reason: why it was not found; of a copy, the bundle that was copied; "" when found.
    """

    status: Literal["found", "copied", "built", "building", "none"]
    reason: str = ""

    def as_text(self) -> str:
        """For people: "found", or "built: no bundle for this key"."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


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
        verified: what the build verified: rows, and with `opt.verify` passes and tiles.
        donor: name of the bundle that the kernel library was copied from, "" when it was compiled.
        hold: keeps the cache from removing it until `release`, or until nobody has this record.
    """

    path: Path
    key: BundleKey
    layout: ProgramLayout
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    notes: dict[str, str]
    report: str
    seconds: dict[str, float]
    verified: tuple[VerifyResult, ...] = ()
    donor: str = ""
    hold: BundleHold | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Its files are not read again: the cache may remove it."""
        if self.hold is not None:
            self.hold.release()

    def package(self, tile: str) -> Path:
        """File of a compiled tile."""
        return tile_package(self.path, tile)

    @property
    def library(self) -> Path:
        """File of the kernel library."""
        return self.path / LIBRARY


def seal(path: Path, key: BundleKey, program: dict[str, Any]) -> None:
    """Write the descriptions of a bundle whose other files are in place, the manifest last."""
    (path / "key.json").write_text(json.dumps(key.entries, indent=1))
    (path / "program.json").write_text(json.dumps(program))
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST)
    sums = {str(p.relative_to(path)): file_digest(p) for p in files}
    (path / MANIFEST).write_text(json.dumps(sums, indent=1))


def open_bundle(path: Path) -> Bundle:
    """Open and check a bundle, and hold it.

    Raises:
        BundleError: a file is missing, truncated or altered; names the file.
    """
    hold = BundleHold(path)
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
        verified=tuple(VerifyResult(**fields) for fields in program.get("verified", ())),
        donor=program.get("donor", ""),
        hold=hold,
    )
