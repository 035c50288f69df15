"""Whether a family compiles to what transformers computes (`runtime/verify`), as a row."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from support_architectures import Family, auto_of, tiny_config
from support_models import opt_o2

from girih.graph.execute.executable import Executable
from girih.graph.files.model_files import save_model
from girih.graph.files.spec import load_spec
from girih.graph.ir.program import EagerStep
from girih.graph.ir.text import digest
from girih.graph.ir.tile_file import tile_to_json
from girih.graph.partition.partition import Program, Tile
from girih.graph.tiles import inductor
from girih.graph.tiles.inductor import TileFn, eager_tile, load_tile
from girih.graph.tiles.pool import CompilePool
from girih.graph.tiles.settings import inductor_options
from girih.graph.trace.trace import trace
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.graph.weights.unused import check_unused
from girih.kernels.base.errors import GirihError
from girih.kernels.base.target import Target, detect_isa
from girih.kernels.build.library import build_library, load_library
from girih.kernels.build.sources import source_digest
from girih.passes.build.build import lower_and_partition
from girih.runtime.inspect.check_model import random_model
from girih.runtime.verify.model import bind, verify_model

VOCAB = 120  # below the tables' 128: some families keep special tokens at the end


@dataclass
class Row:
    """One row of the table."""

    name: str
    result: str = ""
    pieces: int = 0
    tiles: int = 0
    eager: int = 0  # calls of modules that stay eager
    rewrites: dict[str, int] = field(default_factory=dict)
    max_error: float = float("nan")
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.result == "verified"


MakeTiles = Callable[[Program, Target], dict[str, TileFn]]


def eager_tiles(program: Program, target: Target) -> dict[str, TileFn]:
    """Every tile operation by operation."""
    return {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}


class SharedTiles:
    """Every tile compiled for this machine, once for all families that have it.

    The new tiles of a family are compiled as one package: most of a compiler's time goes into
    reading headers, which all of them need. Packages are kept by what makes them: the tiles' keys,
    Inductor's options, and the files that drive it. The compile process is started once.

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
        self._packages: dict[str, Path] = {}
        for path in self.directory.glob("*.keys"):
            self._packages.update(dict.fromkeys(path.read_text().split(), path))
        self.compiled = 0
        library = self.directory / f"kernels-{source_digest()[:16]}.so"
        if not library.exists():
            build_library(self._target.isa, library)
        load_library(library)

    def __call__(self, program: Program, target: Target) -> dict[str, TileFn]:
        missing = {k: t for k, t in program.tiles.items() if k not in self._packages}
        if missing:
            self._compile(missing)
        joints = {path: JointTiles(path) for path in {self._packages[k] for k in program.tiles}}
        return {key: joints[self._packages[key]].tile(key) for key in program.tiles}

    def close(self) -> None:
        """End the compile process."""
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None

    def _compile(self, tiles: dict[str, Tile]) -> None:
        if self._pool is None:
            self._pool = CompilePool(1).__enter__()
        joint = joined([tile_to_json(tile.graph) for tile in tiles.values()])
        name = digest(" ".join(tiles))
        with tempfile.TemporaryDirectory(dir=self.directory) as scratch:
            source, package = Path(scratch) / f"{name}.json", Path(scratch) / f"{name}.pt2"
            source.write_text(json.dumps(joint))
            try:
                self._pool.compile([(source, package)], self._target, lambda *_: None)
            except BaseException:
                self.close()  # a pool ends with its first failure
                raise
            package.rename(self.directory / package.name)
            source.rename(self.directory / source.name)
        keys = self.directory / f"{name}.keys"
        keys.write_text(" ".join(tiles))
        self._packages.update(dict.fromkeys(tiles, keys))
        self.compiled += len(tiles)


def joined(tiles: list[dict[str, Any]]) -> dict[str, Any]:
    """One graph, as JSON, that computes several tiles beside each other.

    `sizes` holds each tile's numbers of inputs and outputs. Sizes of one name are one size.
    """
    num_inputs = sum(len(tile["inputs"]) for tile in tiles)
    calls: list[dict[str, Any]] = []
    inputs: list[dict[str, Any]] = []
    outputs: list[int] = []
    for tile in tiles:
        own = len(tile["inputs"])
        first, first_call = len(inputs), num_inputs + len(calls)
        numbers = [first + n for n in range(own)]
        numbers += [first_call + n for n in range(len(tile["calls"]))]
        inputs += tile["inputs"]
        calls += [_renumbered(call, numbers) for call in tile["calls"]]
        outputs += [numbers[n] for n in tile["outputs"]]
    sizes = [(len(tile["inputs"]), len(tile["outputs"])) for tile in tiles]
    return {"inputs": inputs, "calls": calls, "outputs": outputs, "sizes": sizes}


def _renumbered(value: Any, numbers: list[int]) -> Any:
    if isinstance(value, list):
        return [_renumbered(v, numbers) for v in value]
    if isinstance(value, dict):
        return {k: numbers[v] if k == "%" else _renumbered(v, numbers) for k, v in value.items()}
    return value


class JointTiles:
    """Tiles that were compiled as one package; the inputs of those not called are zeros.

    Args:
        keys: file of the tiles' keys, beside the package and its graph.
    """

    def __init__(self, keys: Path) -> None:
        joint = json.loads(keys.with_suffix(".json").read_text())
        self._rows: list[dict[str, Any]] = joint["inputs"]
        self._run = load_tile(keys.with_suffix(".pt2"))
        self._spans: dict[str, tuple[slice, slice]] = {}
        start = end = 0
        for key, (takes, gives) in zip(keys.read_text().split(), joint["sizes"], strict=True):
            self._spans[key] = slice(start, start + takes), slice(end, end + gives)
            start, end = start + takes, end + gives
        self._zeros: dict[tuple[tuple[str, int], ...], list[torch.Tensor]] = {}

    def tile(self, key: str) -> TileFn:
        """One of them."""
        takes, gives = self._spans[key]

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            everything = list(self._idle(takes, inputs))
            everything[takes] = inputs
            return self._run(everything)[gives]

        return run

    def _idle(self, takes: slice, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        sizes: dict[str, int] = {}
        for row, value in zip(self._rows[takes], inputs, strict=True):
            named = zip(row["shape"], value.shape, strict=True)
            sizes.update({name: size for name, size in named if isinstance(name, str)})
        key = tuple(sorted(sizes.items()))
        if key not in self._zeros:
            shapes = [
                [sizes.get(s, 2) if isinstance(s, str) else s for s in r["shape"]]
                for r in self._rows
            ]
            kinds = [getattr(torch, row["dtype"]) for row in self._rows]
            self._zeros[key] = [torch.zeros(s, dtype=k) for s, k in zip(shapes, kinds, strict=True)]
        return self._zeros[key]


def check_family(family: Family, directory: Path, make_tiles: MakeTiles = eager_tiles) -> Row:
    """Build a tiny model, run it through girih at O2, compare with transformers' eager float32."""
    started = time.perf_counter()
    row = Row(family.name)
    try:
        model = random_model(auto_of(family), tiny_config(family))
        save_model(model, directory)
        program = _program(directory, row)
        executable = _bind(program, directory, make_tiles)
        found = verify_model(model, executable, VOCAB, encodes=family.kind == "encoder")
        row.result = found.first_difference or "verified"
        row.max_error = found.error
    except GirihError as refusal:
        row.result = f"refused: {refusal}"
    row.seconds = time.perf_counter() - started
    return row


def _program(directory: Path, row: Row) -> Program:
    target = Target("cpu", detect_isa(), 2, "g++")
    traced = trace(load_spec(str(directory), task="generate"))
    lowered, program = lower_and_partition(traced, opt_o2(), target)
    row.pieces, row.tiles = program.num_pieces, len(program.tiles)
    row.eager = sum(isinstance(step, EagerStep) for step in program.layout.steps)
    row.rewrites = {r.name: r.rewrites for r in lowered.records}
    return program


def _bind(program: Program, directory: Path, make_tiles: MakeTiles) -> Executable:
    target = Target("cpu", detect_isa(), 2, "g++")
    spec = load_spec(str(directory), task="generate")
    with open_checkpoint(spec.files) as checkpoint:
        check_unused(program.weights, checkpoint, spec)
        weights = load_weights(program.weights, checkpoint, program.constants, target.isa)
    return bind(program.layout, make_tiles(program, target), weights)
