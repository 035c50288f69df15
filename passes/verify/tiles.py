"""Level "tiles": each compiled tile against its eager graph, on random values.

    python -m girih.passes.verify.tiles DIRECTORY TOLERANCE_FACTOR

runs it in a process of its own: code that was just generated may crash, and a process serves one
kernel library. The answer is one JSON line, a list of `VerifyResult`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import fx

from girih.graph.ir.random_values import VERIFY_SIZES, random_tensors, relative_rmse, tolerance
from girih.graph.ir.text import SymbolNames, target_name, value_text
from girih.graph.ir.tile_file import read_tile
from girih.graph.ir.verify_result import VerifyResult, worst_of
from girih.graph.tiles.inductor import TileFn, eager_tile, load_tile
from girih.kernels.base.errors import CompileError
from girih.kernels.build.library import load_library

SIZES = (list(VERIFY_SIZES.values()), [1, 1])
"""Symbolic sizes to run with: many tokens, and the single one of a decode step."""


def verify_tiles(directory: Path, factor: float = 1.0) -> list[VerifyResult]:
    """Verify the tiles of a bundle that was compiled for this machine, in another process.

    Args:
        directory: with `tiles/*.json`, `tiles/*.pt2` and `kernels.so`.
        factor: how many times the usual rounding is allowed.

    Returns:
        One result per tile, all passed.

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
            f"verifying the compiled tiles ended with exit code {done.returncode}:\n{tail}"
        )
    results = [VerifyResult(**fields) for fields in json.loads(lines[-1])]
    return [r.require(CompileError, "opt=O0 runs without compiled tiles") for r in results]


def verify_tile(key: str, graph: fx.Graph, compiled: TileFn, factor: float = 1.0) -> VerifyResult:
    """Run one tile both ways; compares every result by relative RMSE."""
    eager = eager_tile(graph)
    [outputs] = [n.args[0] for n in graph.nodes if n.op == "output"]
    compared = f"tile {key}, compiled and eager"
    results = []
    started = time.perf_counter()
    for sizes in SIZES:
        inputs = random_tensors(graph, sizes)
        with torch.no_grad():
            wanted, found = eager(list(inputs)), compiled(list(inputs))
        for node, expected, value in zip(outputs, wanted, found, strict=True):
            error, bound = relative_rmse(value, expected), factor * tolerance(expected.dtype)
            place = (
                f"result {value_text(node.meta['val'], SymbolNames())} of "
                f"{target_name(node.target)} ({node.name}) with sizes {sizes}"
            )
            where = "" if error <= bound else place
            results.append(VerifyResult("tiles", compared, error, bound, first_difference=where))
        if not all(result.passed for result in results):
            break
    worst = worst_of("tiles", compared, results)
    return replace(worst, seconds=time.perf_counter() - started)


def main(directory: Path, factor: float) -> None:
    """Verify the tiles of a directory up to the first that fails, and print the results."""
    load_library(directory / "kernels.so")
    results: list[VerifyResult] = []
    for package in sorted((directory / "tiles").glob("*.pt2")):
        graph = read_tile(package.with_suffix(".json"))
        results.append(verify_tile(package.stem, graph, load_tile(package), factor))
        if not results[-1].passed:
            break
    print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
