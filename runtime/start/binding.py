"""A program bound to its weights and its KV cache: checked, ready to run, and exchangeable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from girih.graph.bundle.bundle import Bundle
from girih.graph.execute.executable import Executable, kv_cache_specs, state_bytes_per_request
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.program import ProgramLayout
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.tiles.inductor import TileFn
from girih.graph.trace.weight_names import plan_for_checkpoint
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.graph.weights.unused import check_unused
from girih.kernels.base.errors import BusyError, ConfigError
from girih.kernels.base.progress import Progress, no_progress
from girih.kernels.base.seconds import timed
from girih.runtime.schedule.cache_size import CacheDemand, CacheSize, plan_cache
from girih.runtime.start.context import Start, StartReport
from girih.runtime.start.runnable_program import RunnableProgram, bundle_tiles
from girih.runtime.start.serving_build import ServingBuild
from girih.runtime.start.wanted import model_spec
from girih.runtime.step.resident import Resident
from girih.runtime.verify.batch_invariance import require_batch_invariant
from girih.runtime.verify.canary import executable_for_canary, verify_canary

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class BoundProgram:
    """A program that can run.

    Attributes:
        executable: it, with weights and KV cache.
        max_model_len: longest request, in tokens.
        resident: what of it can be dropped and read again.
        report: how the start went.
    """

    executable: Executable
    max_model_len: int
    resident: Resident
    report: StartReport


def bind(start: Start, program: RunnableProgram) -> BoundProgram:
    """Load weights, size the KV cache, bind, and run the canary.

    Raises:
        WeightError: the checkpoint does not fit the program.
        CapacityError: the KV cache does not hold one request of the model length.
        ConfigError: the model cannot do what it is to do.
        BundleError: the compiled code answers something else than it did.
    """
    layout, seconds = program.layout, {**start.seconds, **program.seconds}
    _require_servable(layout, start.spec)
    with timed(seconds, "weights"):
        weights = _load(start, program, start.spec, start.progress)
    size = _cache_size(start, layout)
    with timed(seconds, "bind"):
        executable = _executable(start, program, weights, size)
    attention, verified = executable.attention_report(), program.verified
    if start.config.runtime.batch_invariant:
        require_batch_invariant(executable, program.bundle)
    if program.build:
        _serve_meanwhile(start, program.build, executable, program.tiles, weights)
    if program.bundle:
        with timed(seconds, "canary"):
            canary = verify_canary(executable, program.bundle, weights, start.spec.vocab_size)
        verified = (*verified, canary)
    length = size.max_model_len
    if layout.is_bidirectional:  # what a step takes limits it, not the cache
        length = start.model_length
    memory = executable.memory_table() + size.groups.as_saving(size.max_model_len)
    report = StartReport(program.origin, seconds, memory, attention, verified)
    return BoundProgram(executable, length, _resident(start, program, executable), report)


def _load(start: Start, program: RunnableProgram, spec: ModelSpec, progress: Progress) -> Weights:
    with open_checkpoint(spec.files) as checkpoint:
        plan = plan_for_checkpoint(program.weights, checkpoint, spec)
        check_unused(plan, checkpoint, spec)
        return load_weights(plan, checkpoint, program.constants, start.target.isa, progress)


def _cache_size(start: Start, layout: ProgramLayout) -> CacheSize:
    """Choose KV groups, blocks and the model length, with the weights in memory."""
    limits = start.config.scheduler
    demand = CacheDemand(
        kv_cache_specs(layout, start.kv_dtype),
        limits.max_num_seqs,
        start.lookahead,
        state_bytes_per_request(layout) * limits.max_num_seqs,
    )
    length = start.model_length
    if layout.is_bidirectional:  # KV of the steps in flight, no more
        length = min(length, limits.max_num_batched_tokens)
    is_auto = start.config.model.max_model_len == "auto"
    return plan_cache(start.config.cache, demand, length, is_auto)


def _executable(
    start: Start, program: RunnableProgram, weights: Weights, size: CacheSize
) -> Executable:
    return Executable(
        program.layout,
        program.tiles,
        weights,
        size.num_blocks,
        start.config.cache.block_size,
        start.dtype,
        program.attention,
        start.config.scheduler.max_num_seqs if program.layout.state_specs else 0,
        size.groups,
        start.kv_dtype,
    )


def _serve_meanwhile(
    start: Start,
    build: ServingBuild,
    executable: Executable,
    pieces: dict[str, TileFn],
    weights: Weights,
) -> None:
    """Take compiled parts in between steps; the canary runs beside, on KV blocks of its own."""

    def before_step() -> None:
        if not build.before_step(executable):
            executable.before_step = None

    def check(bundle: Bundle) -> VerifyResult:
        beside = executable_for_canary(executable, bundle, weights, bundle_tiles(bundle), None)
        return verify_canary(beside, bundle, weights, start.spec.vocab_size)

    executable.before_step = before_step
    build.serve(pieces, check)


def _resident(start: Start, program: RunnableProgram, executable: Executable) -> Resident:
    """Collect the parts that `executable` keeps in memory, and where they come from."""
    pieces, build = dict(program.tiles), program.build

    def bundle() -> Bundle | None:
        if build is None:
            return program.bundle
        return build.result()[0] if build.error is None else None

    def load_tiles() -> dict[str, TileFn]:
        source = bundle()
        return dict(pieces) if source is None else bundle_tiles(source)

    def check(weights: Weights) -> str:
        source = bundle()
        if source is None:
            return "no canary: eager pieces answer"
        return verify_canary(executable, source, weights, start.spec.vocab_size).as_text()

    def read_spec(source: str) -> ModelSpec:
        return model_spec(replace(start.config.model, source=source, dtype=start.spec.dtype))

    def read(spec: ModelSpec) -> Weights:
        return _load(start, program, spec, no_progress)

    return Resident(
        executable,
        start.spec,
        read_spec,
        read,
        load_tiles,
        partial(_require_built, executable, build),
        check,
        start.target.threads,
    )


def _require_servable(layout: ProgramLayout, spec: ModelSpec) -> None:
    """Refuse what the engine would run wrongly.

    Raises:
        ConfigError: an encoder that is to generate, or a mode of pooling that means nothing.
    """
    if spec.pooling is None:
        if layout.is_bidirectional:
            raise ConfigError(
                f"{spec.architecture} attends in both directions, so it cannot generate; use "
                "model.task=embed"
            )
    elif spec.pooling.resolved(layout.is_bidirectional) == "cls" and not layout.is_bidirectional:
        raise ConfigError(
            "model.pooling is 'cls', but a token of this model sees only those before it, so its "
            "first one says nothing of the text; use last or mean"
        )


def _require_built(executable: Executable, build: ServingBuild | None) -> None:
    if build is not None and build.take_in(executable):
        state = build.state()
        raise BusyError(
            f"compiled code is still being taken in ({state.phase}, tile {state.tiles} of "
            f"{state.total_tiles}); try again when /ready says that it is done"
        )
