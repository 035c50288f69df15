"""The proof of compiled tiles: each against its eager graph, on random values.

    python -m girih.passes.verify.tiles DIRECTORY TOLERANCE_FACTOR

runs it in a process of its own: code that was just generated may crash, and a process serves one
kernel library. The answer is one JSON line, {"errors": {KEY: RMSE}, "refused": null | text}.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from torch import fx

from girih.graph.ir.random_values import PROOF_SIZES, random_tensors, relative_rmse, tolerance
from girih.graph.ir.text import SymbolNames, target_name, value_text
from girih.graph.ir.tile_file import read_tile
from girih.graph.tiles.inductor import TileFn, eager_tile, load_tile
from girih.kernels.base.errors import CompileError
from girih.kernels.build.library import load_library

SIZES = (list(PROOF_SIZES.values()), [1, 1])
"""Symbolic sizes to run with: many tokens, and the single one of a decode step."""


def prove_tiles(directory: Path, factor: float = 1.0) -> dict[str, float]:
    """Prove the tiles of a bundle that was compiled for this machine.

    Args:
        directory: with `tiles/*.json`, `tiles/*.pt2` and `kernels.so`.
        factor: how many times the usual rounding is allowed.

    Returns:
        Largest relative RMSE by tile key.

    Raises:
        CompileError: a tile computes something else than its graph, or crashes; names the tile
            and the first result that differs.
    """
    command = [sys.executable, "-m", "girih.passes.verify.tiles", str(directory), str(factor)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        tail = "\n".join(done.stderr.splitlines()[-4:])
        raise CompileError(
            f"the proof of the compiled tiles ended with exit code {done.returncode}:\n{tail}"
        )
    answer = json.loads(lines[-1])
    if answer["refused"]:
        raise CompileError(answer["refused"])
    errors: dict[str, float] = answer["errors"]
    return errors


def prove_tile(key: str, graph: fx.Graph, compiled: TileFn, factor: float = 1.0) -> float:
    """Run one tile both ways; returns the largest relative RMSE of a result.

    Raises:
        CompileError: a result differs by more than rounding.
    """
    eager = eager_tile(graph)
    [results] = [n.args[0] for n in graph.nodes if n.op == "output"]
    worst = 0.0
    for sizes in SIZES:
        inputs = random_tensors(graph, sizes)
        with torch.no_grad():
            wanted, found = eager(list(inputs)), compiled(list(inputs))
        for node, expected, result in zip(results, wanted, found, strict=True):
            error = relative_rmse(result, expected)
            bound = factor * tolerance(expected.dtype)
            if error > bound:
                raise CompileError(
                    f"tile {key} computes something else than its graph: result "
                    f"{value_text(node.meta['val'], SymbolNames())} of {target_name(node.target)} "
                    f"({node.name}) differs by relative RMSE {error:.2e} with sizes {sizes}, at "
                    f"most {bound:.0e} is rounding; opt=O0 runs without compiled tiles"
                )
            worst = max(worst, error)
    return worst


def main(directory: Path, factor: float) -> None:
    """Prove every tile of a directory and print the answer."""
    load_library(directory / "kernels.so")
    errors: dict[str, float] = {}
    refused = None
    try:
        for package in sorted((directory / "tiles").glob("*.pt2")):
            graph = read_tile(package.with_suffix(".json"))
            errors[package.stem] = prove_tile(package.stem, graph, load_tile(package), factor)
    except CompileError as error:
        refused = str(error)
    print(json.dumps({"errors": errors, "refused": refused}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
