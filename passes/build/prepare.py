"""Preparing a bundle for a device that this machine does not have.

What depends on the model alone is done: tracing, passes, splitting, constants, the key. Machine
code needs the device's own compiler. The directory is marked by `prepared.json` and has no
manifest, so nothing takes it for a finished bundle.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from safetensors.torch import save_file

from girih.graph.bundle.files import PREPARED, BundleKey, named_bundle, tile_graph
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.tile_file import write_tile
from girih.graph.partition.partition import Program
from girih.graph.trace.trace import trace
from girih.kernels.base.errors import BundleError
from girih.kernels.base.progress import Progress, no_progress
from girih.kernels.base.target import Target
from girih.passes.build.build import lower_and_partition
from girih.passes.build.key import bundle_dir, bundle_key
from girih.passes.options import OptConfig
from girih.passes.runner import Lowered


def prepare(
    spec: ModelSpec,
    opt: OptConfig,
    target: Target,
    bundle: str | None = None,
    progress: Progress = no_progress,
) -> str:
    """Write what can be built here, and say what remains.

    Args:
        spec: the model.
        opt: switches.
        target: a device of another machine.
        bundle: directory to write; None takes one of the cache, by key.
        progress: observer.

    Returns:
        A report for people; its first line names the directory, the last ones what remains.

    Raises:
        BundleError: the directory cannot be written.
    """
    key = bundle_key(spec, opt, target)
    path = named_bundle(bundle) if bundle else bundle_dir() / f"{key.digest}.prepared"
    traced = trace(spec, progress)
    lowered, program = lower_and_partition(traced, opt, target)
    remains = [
        f"compile {len(program.tiles)} tiles for {target.arch}: "
        f"{', '.join(program.tiles)} (needs torch with CUDA, and Triton)",
        f"build the kernel library for {target.arch} (needs nvcc)",
    ]
    try:
        _write(path, spec, lowered, program, key, remains)
    except OSError as error:
        raise BundleError(f"the bundle could not be written to {path}: {error}") from error
    return (
        f"prepared {path}\nkey {key.digest}, {target.device} {target.arch}, "
        f"{len(program.tiles)} tiles as graphs, {len(program.constants)} constants\n"
        + "".join(f"remains: {line}\n" for line in remains)
        + f"pieces={program.num_pieces} tiles={len(program.tiles)}"
    )


def _write(
    path: Path,
    spec: ModelSpec,
    lowered: Lowered,
    program: Program,
    key: BundleKey,
    remains: list[str],
) -> None:
    (path / "tiles").mkdir(parents=True, exist_ok=True)
    for tile in program.tiles.values():
        write_tile(tile.graph, tile_graph(path, tile.key))
    save_file(program.constants, path / "constants.safetensors")
    (path / "key.json").write_text(json.dumps(key.entries, indent=1))
    description = {
        "model": spec.name,
        "layout": program.layout.to_json(),
        "weights": program.weights.to_json(),
        "notes": {tile.key: tile.note for tile in program.tiles.values()},
        "report": lowered.report(),
        "verified": [dataclasses.asdict(result) for result in program.verified],
        "remains": remains,
    }
    (path / PREPARED).write_text(json.dumps(description))
