"""Scheduler, batch and runner around a bound program: an engine core."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from girih.graph.execute.executable import Executable
from girih.graph.tiles.count import COMPILES
from girih.runtime.engine.core import EngineCore
from girih.runtime.observe.profiler import StepProfiler
from girih.runtime.observe.step_trace import StepTracer
from girih.runtime.records.pooling_params import PoolingFacts
from girih.runtime.sample.logits_processors import NamedProcessor, check_arguments, load_processors
from girih.runtime.schedule.kv_cache import KVCacheManager
from girih.runtime.schedule.scheduler import Scheduler
from girih.runtime.start.binding import BoundProgram
from girih.runtime.start.context import Start
from girih.runtime.start.serving_build import ServingBuild
from girih.runtime.step.base import StepRunner
from girih.runtime.step.batch import PersistentBatch
from girih.runtime.step.generate import CompiledModelRunner
from girih.runtime.step.pooler import make_pooler, pooling_facts
from girih.runtime.step.pooling import PoolingRunner
from girih.runtime.step.replay import ReplayManager, manage_replays
from girih.runtime.structured.rows import GrammarRows
from girih.runtime.structured.store import GrammarStore
from girih.runtime.structured.vocabulary import read_vocabulary
from girih.runtime.verify.canary import output_width


def generating_core(start: Start, bound: BoundProgram) -> EngineCore:
    """The core of a model that generates.

    Raises:
        ConfigError: a logits processor cannot be loaded.
    """
    limits, spec, threads = start.config.scheduler, start.spec, start.target.threads
    processors = load_processors(
        start.config.runtime.logits_processors, spec.vocab_size, limits.max_num_seqs
    )
    kv, batch = _cache_and_batch(start, bound, processors=processors)
    grammars = GrammarStore(
        lambda: read_vocabulary(spec.files.path, spec.vocab_size, spec.eos_token_ids), threads
    )
    scheduler = Scheduler(limits, kv, bound.max_model_len, grammars)
    rows = GrammarRows(grammars, spec.vocab_size, batch.failures)
    core = _assembled(
        start, bound, scheduler, CompiledModelRunner(_replays(start, bound), batch, rows, threads)
    )
    core.request_checks.append(lambda r: check_arguments(processors, r.sampling))
    return core


def pooling_core(start: Start, bound: BoundProgram) -> tuple[EngineCore, PoolingFacts]:
    """The core of a model that embeds or classifies, and what can be asked of it."""
    limits, spec, executable = start.config.scheduler, start.spec, bound.executable
    is_bidirectional = executable.layout.is_bidirectional
    if is_bidirectional:  # a token sees later ones: no part of a text can be computed alone
        limits = replace(limits, enable_chunked_prefill=False)
    width = output_width(executable)
    pooler = make_pooler(spec, is_bidirectional, width)
    may_cache = not (is_bidirectional or pooler.mode == "all")
    kv, batch = _cache_and_batch(start, bound, may_cache, outputs_of=pooler.mode)
    scheduler = Scheduler(limits, kv, bound.max_model_len, task=spec.task)
    runner = PoolingRunner(_replays(start, bound), batch, pooler, start.target.threads)
    core = _assembled(start, bound, scheduler, runner)
    return core, pooling_facts(spec, pooler, width, start.config.model.matryoshka)


def watch_compiling(core: EngineCore, executable: Executable, build: ServingBuild | None) -> None:
    """Let the core tell how a build behind it gets on, and what else this process compiles."""
    ready = COMPILES.total
    core.count_recompiles = lambda: COMPILES.total - ready
    if build is not None:
        started = build.compiles_at_start
        core.count_recompiles = lambda: max(0, COMPILES.total - started - build.state().total_tiles)
        core.compile_state = build.state
        core.idle_hook = lambda core: build.tend(core, executable)
        core.closers.append(build.cancel)


def _cache_and_batch(
    start: Start,
    bound: BoundProgram,
    may_cache: bool = True,
    processors: tuple[NamedProcessor, ...] = (),
    outputs_of: str = "last",
) -> tuple[KVCacheManager, PersistentBatch]:
    cache, limits, executable = start.config.cache, start.config.scheduler, bound.executable
    # A state at the end of a prefix is not kept, so a cached prefix would be of no use.
    caching = may_cache and cache.enable_prefix_caching and not executable.layout.state_specs
    groups = executable.groups.groups
    kv = KVCacheManager(executable.num_blocks, cache.block_size, caching, groups, start.lookahead)
    batch = PersistentBatch(
        limits.max_num_seqs,
        bound.max_model_len,
        cache.block_size,
        start.spec.vocab_size,
        len(groups),
        processors,
        outputs_of,
        "token_types" in executable.layout.inputs,
    )
    return kv, batch


def _replays(start: Start, bound: BoundProgram) -> ReplayManager:
    config = start.config
    return manage_replays(bound.executable, config.runtime, config.scheduler, bound.max_model_len)


def _assembled(
    start: Start, bound: BoundProgram, scheduler: Scheduler, runner: StepRunner[Any]
) -> EngineCore:
    runner.resident = bound.resident
    core = EngineCore(scheduler, runner, start.config.runtime.async_scheduling)
    core.replay_stats = runner.replays.stats
    if start.config.runtime.trace is not None:
        core.observers.append(StepTracer(Path(start.config.runtime.trace), scheduler))
    if start.config.runtime.profile_dir is not None:
        folder = Path(start.config.runtime.profile_dir).expanduser()
        core.profiler = StepProfiler(folder, scheduler)
        core.observers.append(core.profiler)
    return core
