"""From a configuration to a running engine, and the two views on the way there.

build_engine   find or build the bundle, load weights, size the KV cache, bind, assemble the core
compile        find or build the bundle only
explain        print every stage of the compilation
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from girih.graph.bundle import Bundle
from girih.graph.checkpoint import open_checkpoint
from girih.graph.compile_count import COMPILES
from girih.graph.executable import Executable, kv_cache_specs, state_bytes_per_request
from girih.graph.inductor import TileFn, eager_tile, load_tile
from girih.graph.partition import Program
from girih.graph.program import ProgramLayout, program_map
from girih.graph.progress import Progress, no_progress
from girih.graph.spec import ModelSpec, load_spec
from girih.graph.trace import trace
from girih.graph.weight_names import plan_for_checkpoint
from girih.graph.weight_plan import WeightPlan
from girih.graph.weights import load_weights
from girih.kernels.errors import BusyError, ConfigError
from girih.kernels.kv_groups import plan_groups
from girih.kernels.library import load_library
from girih.kernels.target import Target, require_runnable, resolve_target
from girih.passes.background import BuildObserver
from girih.passes.build import bundle_key, find_or_build, lower_and_partition
from girih.passes.prepare import prepare
from girih.runtime.batch import PersistentBatch
from girih.runtime.batch_invariance import require_batch_invariant
from girih.runtime.cache_size import CacheDemand, CacheSize, plan_cache
from girih.runtime.canary import check_canary, executable_for_canary, output_width
from girih.runtime.config import EngineConfig, ModelConfig
from girih.runtime.engine import PLANS_IN_FLIGHT, EngineCore
from girih.runtime.executor import ModelRunner
from girih.runtime.kv_cache import KVCacheManager
from girih.runtime.logits_processors import NamedProcessor, check_arguments, load_processors
from girih.runtime.messages import EngineFacts
from girih.runtime.model_runner import CompiledModelRunner
from girih.runtime.pooler import make_pooler, pooling_facts
from girih.runtime.pooling_params import PoolingFacts
from girih.runtime.pooling_runner import PoolingRunner
from girih.runtime.profiler import StepProfiler
from girih.runtime.resident import Resident, ResidentRunner
from girih.runtime.scheduler import Scheduler
from girih.runtime.serving_build import ServingBuild
from girih.runtime.step_trace import StepTracer
from girih.runtime.structured.rows import GrammarRows
from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary

T = TypeVar("T")


@dataclass
class LaunchReport:
    """How a start went.

    Attributes:
        bundle: "found", "built: REASON", or "none: ..." at O0.
        seconds: per stage.
        memory: what the executable owns, for people.
        attention: backend taken, and why others were not.
        canary: how the compiled program's answer to a known prompt compared.
    """

    bundle: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: str = ""
    attention: str = ""
    canary: str = ""

    def timed(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` and book its time under `name`."""
        started = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
        return result

    def as_text(self) -> str:
        """A few lines for the log."""
        parts = ", ".join(f"{name} {value:.2f} s" for name, value in self.seconds.items())
        checked = f"{self.attention}\n{self.canary}".strip()
        return f"bundle {self.bundle}\n{parts}\n{checked}\n{self.memory}"


@dataclass(frozen=True)
class EngineHandle:
    """A running engine and the facts a front end needs.

    Attributes:
        core: the engine core.
        spec: the model.
        name: name to show.
        key: the bundle's key ("eager" at O0).
        max_model_len: longest prompt + output, in tokens.
        report: how the start went.
        pooling: of a model that embeds or classifies.
    """

    core: EngineCore
    spec: ModelSpec
    name: str
    key: str
    max_model_len: int
    report: LaunchReport
    pooling: PoolingFacts | None = None

    @property
    def facts(self) -> EngineFacts:
        """What front ends are told of the engine."""
        return EngineFacts(
            name=self.name,
            key=self.key,
            model_path=str(self.model_path),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            task=self.spec.task,
            pooling=self.pooling,
        )

    @property
    def model_path(self) -> Path:
        """Directory with the tokenizer."""
        return self.spec.files.path

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.spec.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation."""
        return self.spec.eos_token_ids


@dataclass(frozen=True)
class _Compiled:
    """What binding needs, from a bundle or from an eager trace."""

    layout: ProgramLayout
    tiles: dict[str, TileFn]
    weights: WeightPlan
    constants: dict[str, torch.Tensor]
    key: str
    attention: str | None
    bundle: Bundle | None = None
    build: ServingBuild | None = None


def build_engine(config: EngineConfig, progress: Progress = no_progress) -> EngineHandle:
    """Build an engine.

    Raises:
        SourceError, WeightError: the model cannot be found or read.
        TraceError, CompileError, BundleError: it cannot be compiled.
        CapacityError: the KV cache does not hold one request of the model length.
    """
    report = LaunchReport()
    model = config.model
    spec = report.timed("spec", lambda: model_spec(model, progress))
    target = _target(config)
    require_runnable(target)
    start = _Start(config, spec, target, report, progress)
    if not config.opt.compile:
        compiled = start.eager()
    elif config.compile.mode == "background":
        compiled = start.while_compiling()
    else:
        compiled = start.from_bundle()
    executable, length = start.bind(compiled)
    if spec.task == "generate":
        core, pooling = start.core(executable, length), None
    else:
        core, pooling = start.pooling_core(executable, length)
    assert isinstance(core.runner, ResidentRunner)
    core.runner.resident = start.resident(executable, compiled)
    _watch_compiling(core, executable, compiled.build)
    if pooling:
        length = core.scheduler.limits.longest_text
    return EngineHandle(core, spec, model.name or spec.name, compiled.key, length, report, pooling)


def model_spec(model: ModelConfig, progress: Progress = no_progress) -> ModelSpec:
    """Read what the configured model is.

    Raises:
        SourceError, ConfigError: as `load_spec`.
    """
    return load_spec(model.source, model.dtype, progress, model.task, model.pooling)


def compile(config: EngineConfig, progress: Progress = no_progress) -> str:
    """Find or build the bundle of a model.

    Returns:
        A report for people; its first line names the bundle's directory.

    Raises:
        As `build_engine`, and ConfigError at O0, which compiles nothing.
    """
    if not config.opt.compile:
        raise ConfigError(f"opt={config.opt.level} compiles nothing; use opt=O2")
    spec = model_spec(config.model, progress)
    target, named = _target(config), config.compile.bundle
    if target.device != "cpu":
        return prepare(spec, config.opt, target, named, progress)
    started = time.perf_counter()
    limit = int(config.compile.cache_gib * 2**30)
    bundle, how = find_or_build(spec, config.opt, target, named, progress, limit)
    seconds = time.perf_counter() - started
    stages = ", ".join(f"{k} {v:.1f} s" for k, v in bundle.seconds.items())
    size = sum(p.stat().st_size for p in bundle.path.rglob("*") if p.is_file())
    return (
        f"bundle {bundle.path}\n"
        f"{how}, {seconds:.1f} s, {size / 2**20:.1f} MiB, key {bundle.key.digest}\n"
        f"built in: {stages}\n{_proof_line(bundle)}" + _pieces_line(bundle.layout)
    )


def explain(config: EngineConfig, progress: Progress = no_progress) -> str:
    """Trace, lower and partition a model, and print every stage.

    Returns:
        Spec, pass table, program map, key; the last line is "pieces=N tiles=K".
    """
    spec = model_spec(config.model, progress)
    target = _target(config)
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
            + _groups_text(program.layout, spec, config),
            key,
            _pieces_line(program.layout),
        )
    )


def _groups_text(layout: ProgramLayout, spec: ModelSpec, config: EngineConfig) -> str:
    """How an engine with this configuration would lay out the KV cache."""
    length = _model_length(spec, config)
    specs = kv_cache_specs(layout, _kv_dtype(spec, config))
    groups = plan_groups(specs, config.cache.block_size, length)
    return groups.as_text() + groups.as_saving(length)


def _kv_dtype(spec: ModelSpec, config: EngineConfig) -> torch.dtype:
    wanted = config.cache.kv_dtype
    dtype: torch.dtype = getattr(torch, spec.dtype if wanted == "auto" else wanted)
    return dtype


def _proof_line(bundle: Bundle) -> str:
    if bundle.proof is None:
        return ""
    passes, tiles = bundle.proof["passes"], bundle.proof["tiles"]
    note = f"; {bundle.proof['note']}" if bundle.proof["note"] else ""
    return (
        f"proved: {len(passes)} passes within {max(passes.values(), default=0.0):.1e}, "
        f"{len(tiles)} tiles within {max(tiles.values(), default=0.0):.1e}{note}\n"
    )


def _pieces_line(layout: ProgramLayout) -> str:
    counts = layout.tile_counts
    return f"pieces={sum(counts.values())} tiles={len(counts)}"


def _target(config: EngineConfig) -> Target:
    wanted = config.target
    if wanted.threads:
        torch.set_num_threads(wanted.threads)
    return resolve_target(wanted.device, wanted.isa, wanted.threads, wanted.arch)


def _model_length(spec: ModelSpec, config: EngineConfig) -> int:
    wanted = config.model.max_model_len
    if wanted is None or isinstance(wanted, str):
        return spec.usual_length
    if wanted > spec.max_position:
        raise ConfigError(
            f"model.max_model_len is {wanted}; {spec.name} was made for at most "
            f"{spec.max_position} tokens"
        )
    return wanted


@dataclass(frozen=True)
class _Start:
    """What the stages of one start share."""

    config: EngineConfig
    spec: ModelSpec
    target: Target
    report: LaunchReport
    progress: Progress

    def from_bundle(self) -> _Compiled:
        """Find or build the bundle and load its code."""
        bundle, self.report.bundle = self.report.timed("bundle", lambda: self._find())
        return self._loaded(bundle)

    def while_compiling(self) -> _Compiled:
        """Load the bundle's code, or start with eager pieces when it must be built first."""
        build = ServingBuild(self._find, self.progress)
        program = self.report.timed("trace and lower", build.program)
        if program is None:
            bundle, self.report.bundle = build.result()
            return self._loaded(bundle)
        self.report.bundle = "being built; eager pieces run until then"
        key = bundle_key(self.spec, self.config.opt, self.target)
        return replace(self._eager_pieces(program), key=key.digest, build=build)

    def eager(self) -> _Compiled:
        """Trace, and run the pieces operation by operation on reference attention."""
        opt = self.config.opt
        traced = self.report.timed("trace", lambda: trace(self.spec, self.progress))
        _, program = self.report.timed(
            "lower", lambda: lower_and_partition(traced, opt, self.target)
        )
        self.report.bundle = f"none: {opt.level} runs eager pieces"
        return self._eager_pieces(program)

    def _find(
        self, observer: BuildObserver | None = None, progress: Progress | None = None
    ) -> tuple[Bundle, str]:
        settings = self.config.compile
        return find_or_build(
            self.spec,
            self.config.opt,
            self.target,
            settings.bundle,
            progress or self.progress,
            int(settings.cache_gib * 2**30),
            observer,
        )

    def _loaded(self, bundle: Bundle) -> _Compiled:
        tiles = self.report.timed("load tiles", lambda: bundle_tiles(bundle))
        return _Compiled(
            bundle.layout, tiles, bundle.weights, bundle.constants, bundle.key.digest, None, bundle
        )

    @staticmethod
    def _eager_pieces(program: Program) -> _Compiled:
        tiles = {key: eager_tile(tile.graph) for key, tile in program.tiles.items()}
        return _Compiled(
            program.layout, tiles, program.weights, program.constants, "eager", "reference"
        )

    def _cache_size(self, layout: ProgramLayout) -> CacheSize:
        """Choose KV groups, blocks and the model length, with the weights in memory."""
        limits = self.config.scheduler
        demand = CacheDemand(
            kv_cache_specs(layout, _kv_dtype(self.spec, self.config)),
            limits.max_num_seqs,
            self._lookahead,
            state_bytes_per_request(layout) * limits.max_num_seqs,
        )
        length = _model_length(self.spec, self.config)
        if layout.is_bidirectional:  # KV of the steps in flight, no more
            length = min(length, limits.max_num_batched_tokens)
        is_auto = self.config.model.max_model_len == "auto"
        return plan_cache(self.config.cache, demand, length, is_auto)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    @property
    def _lookahead(self) -> int:
        """Tokens of one request in plans whose result is not there, at most."""
        plans = PLANS_IN_FLIGHT if self.config.runtime.async_scheduling else 1
        return plans * self.config.scheduler.max_num_batched_tokens

    def bind(self, compiled: _Compiled) -> tuple[Executable, int]:
        """Load weights, size the KV cache and bind; also returns the longest request, in tokens."""
        _require_servable(compiled.layout, self.spec)
        weights = self.report.timed(
            "weights", lambda: self._weights(compiled, self.spec, self.progress)
        )
        size = self._cache_size(compiled.layout)
        executable = self.report.timed(
            "bind",
            lambda: Executable(
                compiled.layout,
                compiled.tiles,
                weights,
                size.num_blocks,
                self.config.cache.block_size,
                self._dtype,
                compiled.attention,
                self.config.scheduler.max_num_seqs if compiled.layout.state_specs else 0,
                size.groups,
                _kv_dtype(self.spec, self.config),
            ),
        )
        saved = size.groups.as_saving(size.max_model_len)
        self.report.memory = executable.memory_table() + saved
        self.report.attention = executable.attention_report()
        bundle, vocab_size = compiled.bundle, self.spec.vocab_size
        if self.config.runtime.batch_invariant:
            require_batch_invariant(executable, bundle)
        if compiled.build:
            _take_in_between_steps(executable, compiled.build)
            compiled.build.serve(
                compiled.tiles, lambda b: self._check_beside(executable, b, weights)
            )
        if bundle:
            self.report.canary = self.report.timed(
                "canary", lambda: check_canary(executable, bundle, weights, vocab_size)
            )
        if compiled.layout.is_bidirectional:  # what a step takes limits it, not the cache
            return executable, _model_length(self.spec, self.config)
        return executable, size.max_model_len

    def _check_beside(
        self, executable: Executable, bundle: Bundle, weights: dict[str, torch.Tensor]
    ) -> str:
        """The canary of a bundle while `executable` serves, with KV blocks of its own."""
        beside = executable_for_canary(executable, bundle, weights, bundle_tiles(bundle), None)
        return check_canary(beside, bundle, weights, self.spec.vocab_size)

    def resident(self, executable: Executable, compiled: _Compiled) -> Resident:
        """What `executable` keeps in memory, and where it came from."""
        pieces, build = dict(compiled.tiles), compiled.build

        def bundle() -> Bundle | None:
            if build is None:
                return compiled.bundle
            return build.result()[0] if build.error is None else None

        def load_tiles() -> dict[str, TileFn]:
            source = bundle()
            return dict(pieces) if source is None else bundle_tiles(source)

        def check(weights: dict[str, torch.Tensor]) -> str:
            source = bundle()
            if source is None:
                return "no canary: eager pieces answer"
            return check_canary(executable, source, weights, self.spec.vocab_size)

        return Resident(
            executable,
            self.spec,
            lambda source: model_spec(
                replace(self.config.model, source=source, dtype=self.spec.dtype)
            ),
            lambda spec: self._weights(compiled, spec, no_progress),
            load_tiles,
            partial(_require_built, executable, build),
            check,
            self.target.threads,
        )

    def _weights(
        self, compiled: _Compiled, spec: ModelSpec, progress: Progress
    ) -> dict[str, torch.Tensor]:
        with open_checkpoint(spec.files) as checkpoint:
            plan = plan_for_checkpoint(compiled.weights, checkpoint, spec)
            return load_weights(plan, checkpoint, compiled.constants, self.target.isa, progress)

    def core(self, executable: Executable, max_model_len: int) -> EngineCore:
        """Assemble scheduler, batch and runner of a model that generates."""
        limits, spec, threads = self.config.scheduler, self.spec, self.target.threads
        processors = load_processors(
            self.config.runtime.logits_processors, spec.vocab_size, limits.max_num_seqs
        )
        kv, batch = self._cache_and_batch(executable, max_model_len, processors=processors)
        grammars = GrammarStore(
            lambda: read_vocabulary(spec.files.path, spec.vocab_size, spec.eos_token_ids), threads
        )
        scheduler = Scheduler(limits, kv, max_model_len, grammars)
        runner = CompiledModelRunner(
            executable, batch, GrammarRows(grammars, spec.vocab_size), threads
        )
        core = self._assembled(scheduler, runner)
        core.request_checks.append(lambda r: check_arguments(processors, r.sampling))
        return core

    def pooling_core(
        self, executable: Executable, max_model_len: int
    ) -> tuple[EngineCore, PoolingFacts]:
        """Assemble scheduler, batch and runner of a model that embeds or classifies."""
        limits, spec = self.config.scheduler, self.spec
        is_bidirectional = executable.layout.is_bidirectional
        if is_bidirectional:  # a token sees later ones: no part of a text can be computed alone
            limits = replace(limits, enable_chunked_prefill=False)
        width = output_width(executable)
        pooler = make_pooler(spec, is_bidirectional, width)
        every_row = pooler.mode == "all"
        may_cache = not (is_bidirectional or every_row)
        kv, batch = self._cache_and_batch(executable, max_model_len, may_cache)
        scheduler = Scheduler(limits, kv, max_model_len, task=spec.task)
        runner = PoolingRunner(executable, batch, pooler, self.target.threads)
        can_cut = self.config.model.matryoshka
        return self._assembled(scheduler, runner), pooling_facts(spec, pooler, width, can_cut)

    def _cache_and_batch(
        self,
        executable: Executable,
        max_model_len: int,
        may_cache: bool = True,
        processors: tuple[NamedProcessor, ...] = (),
    ) -> tuple[KVCacheManager, PersistentBatch]:
        cache, limits = self.config.cache, self.config.scheduler
        # A state at the end of a prefix is not kept, so a cached prefix would be of no use.
        caching = may_cache and cache.enable_prefix_caching and not executable.layout.state_specs
        groups = executable.groups.groups
        kv = KVCacheManager(
            executable.num_blocks, cache.block_size, caching, groups, self._lookahead
        )
        batch = PersistentBatch(
            limits.max_num_seqs,
            max_model_len,
            cache.block_size,
            self.spec.vocab_size,
            len(groups),
            processors,
        )
        return kv, batch

    def _assembled(self, scheduler: Scheduler, runner: ModelRunner) -> EngineCore:
        core = EngineCore(scheduler, runner, self.config.runtime.async_scheduling)
        if self.config.runtime.trace is not None:
            core.observers.append(StepTracer(Path(self.config.runtime.trace), scheduler))
        if self.config.runtime.profile_dir is not None:
            folder = Path(self.config.runtime.profile_dir).expanduser()
            core.profiler = StepProfiler(folder, scheduler)
            core.observers.append(core.profiler)
        return core


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


def _watch_compiling(core: EngineCore, executable: Executable, build: ServingBuild | None) -> None:
    """Let the core tell how a build behind it gets on, and what else this process compiles."""
    ready = COMPILES.total
    core.count_recompiles = lambda: COMPILES.total - ready
    if build is not None:
        started = build.compiles_at_start
        core.count_recompiles = lambda: max(0, COMPILES.total - started - build.state().total_tiles)
        core.compile_state = build.state
        core.chore = lambda core: build.tend(core, executable)


def _take_in_between_steps(executable: Executable, build: ServingBuild) -> None:
    def before_step() -> None:
        if not build.take_in(executable):
            executable.before_step = None

    executable.before_step = before_step


def bundle_tiles(bundle: Bundle) -> dict[str, TileFn]:
    """The compiled tiles of a bundle by key, its kernel library loaded first."""
    load_library(bundle.library)
    return {key: load_tile(bundle.package(key)) for key in bundle.layout.tile_counts}
