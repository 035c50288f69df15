"""From a configuration to a running engine, and the two views on the way there.

build_engine   find or build the bundle, load weights, size the KV cache, bind, assemble the core
compile        find or build the bundle only
explain        print every stage of the compilation

The stages: `context.py` (what they share), `runnable_program.py`, `binding.py`, `assembly.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from girih.graph.bundle.bundle import Bundle
from girih.graph.execute.executable import kv_cache_specs
from girih.graph.ir.program import ProgramLayout, program_map
from girih.graph.ir.verify_result import verify_report
from girih.graph.trace.trace import trace
from girih.kernels.base.errors import ConfigError
from girih.kernels.base.progress import Progress, no_progress
from girih.kernels.base.target import require_runnable
from girih.kernels.kv.groups import plan_groups
from girih.passes.build.build import find_or_build, lower_and_partition
from girih.passes.build.key import bundle_key
from girih.passes.build.prepare import prepare
from girih.runtime.engine.core import EngineCore
from girih.runtime.records.config import EngineConfig
from girih.runtime.records.messages import EngineFacts
from girih.runtime.start.assembly import generating_core, pooling_core, watch_compiling
from girih.runtime.start.binding import bind
from girih.runtime.start.context import Start, StartReport, start_of
from girih.runtime.start.runnable_program import RunnableProgram, obtain_program


@dataclass(frozen=True)
class Engine:
    """An engine that takes requests.

    Attributes:
        core: the engine core.
        facts: what front ends are told of it.
        report: how the start went.
    """

    core: EngineCore
    facts: EngineFacts
    report: StartReport


def build_engine(config: EngineConfig, progress: Progress = no_progress) -> Engine:
    """Build an engine.

    Raises:
        SourceError, WeightError: the model cannot be found or read, or its files do not say what
            an engine has to know.
        TraceError, CompileError, BundleError: it cannot be compiled.
        CapacityError: the KV cache does not hold one request of the model length.
    """
    start = start_of(config, progress)
    require_runnable(start.target)
    start.require_facts()
    return engine_of(start, obtain_program(start))


def engine_of(start: Start, program: RunnableProgram) -> Engine:
    """Bind a program and put an engine around it.

    Raises:
        WeightError, CapacityError, BundleError: as `bind`.
    """
    try:
        return _engine_around(start, program)
    except BaseException:
        program.release()  # a build waits for the engine, and holds the bundle's lock
        raise


def _engine_around(start: Start, program: RunnableProgram) -> Engine:
    bound, spec = bind(start, program), start.spec
    length, pooling = bound.max_model_len, None
    if spec.task == "generate":
        core = generating_core(start, bound)
    else:
        core, pooling = pooling_core(start, bound)
        length = core.scheduler.limits.longest_text
    watch_compiling(core, bound.executable, program.build)
    if program.bundle is not None:
        core.closers.append(program.bundle.release)
    facts = EngineFacts(
        name=start.config.model.name or spec.name,
        key=program.key,
        model_path=str(spec.files.path),
        max_model_len=length,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        task=spec.task,
        pooling=pooling,
    )
    return Engine(core, facts, bound.report)


def compile(config: EngineConfig, progress: Progress = no_progress) -> str:
    """Find or build the bundle of a model.

    Returns:
        A report for people; its first line names the bundle's directory.

    Raises:
        As `build_engine`, and ConfigError at O0, which compiles nothing.
    """
    if not isinstance(config, EngineConfig):
        raise ConfigError(
            f"compile was given {config!r}; it takes an EngineConfig. By a model's name: "
            "`girih compile model=smollm2`"
        )
    if not config.opt.compile:
        raise ConfigError(f"opt={config.opt.level} compiles nothing; use opt=O2")
    start = start_of(config, progress)
    spec, target = start.spec, start.target
    if target.device != "cpu":
        return prepare(spec, config.opt, target, config.compile.bundle, progress)
    started = time.perf_counter()
    place = replace(start.bundle_place, may_build=True)
    bundle, origin = find_or_build(spec, config.opt, target, place, progress)
    seconds = time.perf_counter() - started
    stages = ", ".join(f"{k} {v:.1f} s" for k, v in bundle.seconds.items())
    size = sum(p.stat().st_size for p in bundle.path.rglob("*") if p.is_file())
    return (
        f"bundle {bundle.path}\n"
        f"{origin.as_text()}, {seconds:.1f} s, {size / 2**20:.1f} MiB, key {bundle.key.digest}\n"
        f"built in: {stages}\n{_donor_line(bundle)}{verify_report(bundle.verified)}"
        + _pieces_line(bundle.layout)
    )


def explain(config: EngineConfig, progress: Progress = no_progress) -> str:
    """Trace, lower and partition a model, and print every stage.

    Returns:
        Spec, pass table, program map, key; the last line is "pieces=N tiles=K".
    """
    start = start_of(config, progress)
    start.require_facts()
    spec, target = start.spec, start.target
    traced = trace(spec, progress)
    lowered, program = lower_and_partition(traced, config.opt, target)
    notes = {tile.key: tile.note for tile in program.tiles.values()}
    key = bundle_key(spec, config.opt, target).as_text() if config.opt.compile else "key eager\n"
    return "\n".join(
        (
            spec.as_text(),
            f"opt {config.opt.level}, target {target.device} {target.isa}, "
            f"traced {len(traced.graph.nodes)} nodes in {traced.seconds:.1f} s\n",
            lowered.report(),
            program_map(program.layout, notes, program.weights)
            + verify_report(program.verified)
            + _groups_text(program.layout, start),
            key,
            _pieces_line(program.layout),
        )
    )


def _groups_text(layout: ProgramLayout, start: Start) -> str:
    """Describe the KV cache that an engine with this configuration would have."""
    length = start.model_length
    specs = kv_cache_specs(layout, start.kv_dtype)
    groups = plan_groups(specs, start.config.cache.block_size, length)
    return groups.as_text() + groups.as_saving(length)


def _donor_line(bundle: Bundle) -> str:
    return f"kernel library taken from bundle {bundle.donor}\n" if bundle.donor else ""


def _pieces_line(layout: ProgramLayout) -> str:
    counts = layout.tile_counts
    return f"pieces={sum(counts.values())} tiles={len(counts)}"
