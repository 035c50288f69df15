"""Whether a family compiles to what transformers computes (`girih.runtime.agreement`), as a row."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from support_architectures import Family, auto_of, tiny_config
from support_models import opt_o2

from girih.graph import inductor
from girih.graph.checkpoint import open_checkpoint
from girih.graph.compile_pool import CompilePool
from girih.graph.compile_settings import inductor_options
from girih.graph.executable import Executable
from girih.graph.inductor import TileFn, eager_tile, load_tile
from girih.graph.model_files import save_model
from girih.graph.partition import Program, Tile
from girih.graph.spec import load_spec
from girih.graph.tile_file import write_tile
from girih.graph.trace import trace
from girih.graph.weights import load_weights
from girih.kernels.errors import GirihError
from girih.kernels.library import build_library, load_library
from girih.kernels.library_sources import source_digest
from girih.kernels.target import Target, detect_isa
from girih.passes.build import lower_and_partition
from girih.runtime.agreement import bind, compare
from girih.runtime.check_model import random_model

VOCAB = 120  # below the tables' 128: some families keep special tokens at the end


@dataclass
class Row:
    """One row of the table."""

    name: str
    result: str = ""
    pieces: int = 0
    tiles: int = 0
    rewrites: dict[str, int] = field(default_factory=dict)
    max_error: float = float("nan")
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        return self.result == "agrees"


MakeTiles = Callable[[Program, Target], dict[str, TileFn]]


def eager_tiles(program: Program, target: Target) -> dict[str, TileFn]:
    """Every tile operation by operation."""
    return {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}


class SharedTiles:
    """Every tile compiled for this machine, once for all families that have it.

    Packages are kept by what makes them: the tile's key, Inductor's options, and the files that
    drive it. The compile processes are started once.

    Args:
        directory: where packages are kept, from one run to the next.
    """

    def __init__(self, directory: Path) -> None:
        self._target = Target("cpu", detect_isa(), 2, "g++")
        facts = f"{torch.__version__} {sorted(inductor_options(self._target).items())}"
        source = Path(inductor.__file__).read_bytes()
        mark = hashlib.sha256(facts.encode() + source).hexdigest()[:16]
        self.directory = directory / mark
        self.directory.mkdir(parents=True, exist_ok=True)
        self._pool: CompilePool | None = None
        self.compiled = 0
        library = self.directory / f"kernels-{source_digest()[:16]}.so"
        if not library.exists():
            build_library(self._target.isa, library)
        load_library(library)

    def __call__(self, program: Program, target: Target) -> dict[str, TileFn]:
        missing = {k: t for k, t in program.tiles.items() if not self._package(k).exists()}
        if missing:
            self._compile(missing)
        return {key: load_tile(self._package(key)) for key in program.tiles}

    def close(self) -> None:
        """End the compile processes."""
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None

    def _package(self, key: str) -> Path:
        return self.directory / f"{key}.pt2"

    def _compile(self, tiles: dict[str, Tile]) -> None:
        if self._pool is None:
            self._pool = CompilePool(2).__enter__()
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            jobs = []
            for key, tile in tiles.items():
                write_tile(tile.graph, Path(scratch) / f"{key}.json")
                jobs.append((Path(scratch) / f"{key}.json", Path(scratch) / f"{key}.pt2"))
            try:
                self._pool.compile(jobs, self._target, self._keep)
            except BaseException:
                self.close()  # a pool ends with its first failure
                raise

    def _keep(self, package: Path, seconds: float) -> None:
        package.rename(self._package(package.stem))
        self.compiled += 1


def check_family(family: Family, directory: Path, make_tiles: MakeTiles = eager_tiles) -> Row:
    """Build a tiny model, run it through girih at O2, compare with transformers' eager float32."""
    started = time.perf_counter()
    row = Row(family.name)
    try:
        model = random_model(auto_of(family), tiny_config(family))
        save_model(model, directory)
        program = _program(directory, row)
        executable = _bind(program, directory, make_tiles)
        found = compare(model, executable, VOCAB, encodes=family.kind == "encoder")
        row.result, row.max_error = found.result, found.max_error
    except GirihError as refusal:
        row.result = f"refused: {refusal}"
    row.seconds = time.perf_counter() - started
    return row


def _program(directory: Path, row: Row) -> Program:
    target = Target("cpu", detect_isa(), 2, "g++")
    traced = trace(load_spec(str(directory), task="generate"))
    lowered, program = lower_and_partition(traced, opt_o2(), target)
    row.pieces, row.tiles = program.num_pieces, len(program.tiles)
    row.rewrites = {r.name: r.rewrites for r in lowered.records}
    return program


def _bind(program: Program, directory: Path, make_tiles: MakeTiles) -> Executable:
    target = Target("cpu", detect_isa(), 2, "g++")
    with open_checkpoint(load_spec(str(directory), task="generate").files) as checkpoint:
        weights = load_weights(program.weights, checkpoint, program.constants, target.isa)
    return bind(program.layout, make_tiles(program, target), weights)
