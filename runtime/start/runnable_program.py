"""The program of a start: a bundle's code, eager pieces, or these until a bundle is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from girih.graph.bundle.bundle import Bundle, BundleOrigin
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.program import ProgramLayout
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.ir.weight_plan import WeightPlan
from girih.graph.partition.partition import Program
from girih.graph.tiles.inductor import TileFn, eager_tile, load_tile
from girih.graph.trace.eager_modules import build_eager_modules
from girih.graph.trace.trace import build_on_meta, trace
from girih.kernels.base.progress import Progress
from girih.kernels.base.seconds import timed
from girih.kernels.build.library import load_library
from girih.passes.build.background import BuildObserver
from girih.passes.build.build import find_or_build, lower_and_partition
from girih.passes.build.key import bundle_key
from girih.runtime.start.context import Start
from girih.runtime.start.serving_build import ServingBuild


@dataclass(frozen=True)
class RunnableProgram:
    """A program that can be bound.

    Attributes:
        layout: steps, values, weights' names.
        tiles: what runs a piece, by tile key.
        weights: how the checkpoint becomes the weights.
        constants: tensors the trace computed.
        key: the bundle's key ("eager" at O0).
        origin: where the code comes from.
        seconds: what obtaining it took, per stage.
        attention: backend that must run; None leaves the choice to the executable.
        bundle: it, when there is one.
        build: the build behind eager pieces.
        verified: its rows, when it was traced for this start.
    """

    layout: ProgramLayout
    tiles: dict[str, TileFn]
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    key: str
    origin: BundleOrigin
    seconds: dict[str, float]
    attention: str | None
    bundle: Bundle | None = None
    build: ServingBuild | None = None
    verified: tuple[VerifyResult, ...] = ()

    def release(self) -> None:
        """End the build behind the pieces, and let the cache remove the bundle."""
        if self.build is not None:
            self.build.cancel()
        if self.bundle is not None:
            self.bundle.release()


def obtain_program(start: Start) -> RunnableProgram:
    """Find, build or trace the program that the configuration asks for.

    Raises:
        TraceError, CompileError, BundleError: the model cannot be compiled.
    """
    seconds: dict[str, float] = {}
    if not start.config.opt.compile:
        return _eager(start, seconds)
    if start.config.compile.mode == "background":
        return _while_compiling(start, seconds)
    with timed(seconds, "bundle"):
        bundle, origin = _find(start)
    return _loaded(start, bundle, origin, seconds)


def bundle_code(bundle: Bundle, spec: ModelSpec) -> dict[str, TileFn]:
    """The compiled tiles of a bundle by key; the modules of `spec` that stay eager are built."""
    build_eager_modules(bundle.layout, lambda: build_on_meta(spec))
    return bundle_tiles(bundle)


def bundle_tiles(bundle: Bundle) -> dict[str, TileFn]:
    """The compiled tiles of a bundle by key, its kernel library loaded first."""
    load_library(bundle.library)
    return {key: load_tile(bundle.package(key)) for key in bundle.layout.tile_counts}


def _while_compiling(start: Start, seconds: dict[str, float]) -> RunnableProgram:
    """The bundle's code, or eager pieces to start with when it must be built first."""
    build = ServingBuild(partial(_find, start), start.progress)
    with timed(seconds, "trace and lower"):
        program = build.program()
    if program is None:
        return _loaded(start, *build.result(), seconds)
    key = bundle_key(start.spec, start.config.opt, start.target)
    origin = BundleOrigin("building", "eager pieces answer until then")
    return replace(_eager_pieces(program, origin, seconds), key=key.digest, build=build)


def _eager(start: Start, seconds: dict[str, float]) -> RunnableProgram:
    """Trace; the pieces run operation by operation on reference attention."""
    opt = start.config.opt
    with timed(seconds, "trace"):
        traced = trace(start.spec, start.progress)
    with timed(seconds, "lower"):
        _, program = lower_and_partition(traced, opt, start.target)
    return _eager_pieces(program, BundleOrigin("none", f"{opt.level} runs eager pieces"), seconds)


def _eager_pieces(
    program: Program, origin: BundleOrigin, seconds: dict[str, float]
) -> RunnableProgram:
    return RunnableProgram(
        program.layout,
        {key: eager_tile(tile.graph) for key, tile in program.tiles.items()},
        program.weights,
        program.constants,
        "eager",
        origin,
        seconds,
        "reference",
        verified=program.verified,
    )


def _find(
    start: Start, observer: BuildObserver | None = None, progress: Progress | None = None
) -> tuple[Bundle, BundleOrigin]:
    return find_or_build(
        start.spec,
        start.config.opt,
        start.target,
        start.bundle_place,
        progress or start.progress,
        observer,
    )


def _loaded(
    start: Start, bundle: Bundle, origin: BundleOrigin, seconds: dict[str, float]
) -> RunnableProgram:
    with timed(seconds, "load tiles"):
        tiles = bundle_code(bundle, start.spec)
    return RunnableProgram(
        bundle.layout,
        tiles,
        bundle.weights,
        bundle.constants,
        bundle.key.digest,
        origin,
        seconds,
        None,
        bundle,
    )
