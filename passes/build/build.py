"""From a spec to a bundle: trace, lower, partition, compile, seal; and finding it again by key.

The chain behind `girih.compile`. Each stage gets exactly what its key entries name, so a bundle is
found without tracing: the key is computed from the spec, the switches and the target alone.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from girih.graph.bundle.bundle import Bundle, BundleOrigin, open_bundle, seal
from girih.graph.bundle.cache import copy_library, mark_used, prune
from girih.graph.bundle.files import (
    BUNDLE_ADVICE,
    LIBRARY,
    MANIFEST,
    BundleKey,
    named_bundle,
    read_key,
    remove_bundle,
    require_bundle,
    tile_graph,
    tile_package,
)
from girih.graph.files.spec import ModelSpec
from girih.graph.ir.tile_file import write_tile
from girih.graph.ir.trace_lock import one_at_a_time
from girih.graph.ir.verify_result import VerifyResult, worst_of
from girih.graph.partition.partition import Program, partition
from girih.graph.tiles.pool import CompilePool
from girih.graph.trace.trace import Traced, trace
from girih.kernels.base.cache_dir import locked
from girih.kernels.base.errors import BundleError, CompileError, ConfigError
from girih.kernels.base.garbage import no_collection
from girih.kernels.base.progress import Progress, ProgressEvent, no_progress
from girih.kernels.base.seconds import timed
from girih.kernels.base.target import Target, why_not_runnable
from girih.kernels.build.library import build_library, require_compiler, stop_builds
from girih.passes.build.background import BuildObserver, Part
from girih.passes.build.key import bundle_dir, bundle_key, tuned
from girih.passes.options import OptConfig
from girih.passes.runner import Lowered, lower
from girih.passes.verify.rows import verify_rows
from girih.passes.verify.tiles import verify_tiles

log = logging.getLogger("girih.build")


@dataclass(frozen=True)
class Place:
    """Where a bundle is looked for, and what may be done when it is not there.

    Attributes:
        bundle: a directory; None is the cache, by key.
        may_build: it may be written; else a named bundle that is missing or damaged is an error.
        may_copy: one of the cache with the same key may become the named one.
        cache_bytes: what the cache may hold after a build; None sets no bound.
    """

    bundle: str | None = None
    may_build: bool = True
    may_copy: bool = True
    cache_bytes: int | None = None


def find_or_build(
    spec: ModelSpec,
    opt: OptConfig,
    target: Target,
    place: Place = Place(),
    progress: Progress = no_progress,
    observer: BuildObserver | None = None,
) -> tuple[Bundle, BundleOrigin]:
    """Open the bundle for a model; when there is none, it is copied or compiled first.

    Args:
        spec: the model.
        opt: switches; `opt.compile` must be true.
        target: what to compile for.
        place: where it is, or is written.
        progress: observer.
        observer: told of what is finished before the bundle is.

    Returns:
        The bundle, and where it comes from: found, copied or built.

    Raises:
        BundleError: the directory named by `place` holds a bundle for something else, or none that
            can be used and none may be written.
        CompileError: compiling failed.
    """
    key = bundle_key(spec, opt, target)
    explicit = place.bundle is not None
    path = named_bundle(place.bundle) if place.bundle else bundle_dir() / key.digest
    if not place.may_build and place.bundle:
        require_bundle(place.bundle)
    found = _look_up(path, key, explicit, opt.verify)
    if isinstance(found, Bundle):
        mark_used(path)
        return found, BundleOrigin("found")
    if not place.may_build and explicit:
        raise BundleError(f"{found}; {BUNDLE_ADVICE}")
    if (path / MANIFEST).exists():
        log.warning("%s; compiling it again", found)
    cached = bundle_dir() / key.digest
    twin = _look_up(cached, key, False, opt.verify) if explicit and place.may_copy else None
    if not isinstance(twin, Bundle):
        require_compiler()
    with _exclusive(path, progress):
        again = _look_up(path, key, explicit, opt.verify)
        if isinstance(again, Bundle):
            return again, BundleOrigin("found")
        if isinstance(twin, Bundle):
            _copy(twin, path)
            return open_bundle(path), BundleOrigin("copied", str(cached))
        _Build(spec, opt, target, key, progress, observer or BuildObserver()).run(path)
    if not explicit and place.cache_bytes is not None:
        for removed in prune(bundle_dir(), place.cache_bytes, keep=path):
            log.info("removed %s from the cache, which is full", removed.path)
    return open_bundle(path), BundleOrigin("built", found)


def _copy(bundle: Bundle, path: Path) -> None:
    """Put a copy of a bundle, which is held meanwhile, at `path`."""
    with _replaced(path) as work:
        shutil.copytree(bundle.path, work, dirs_exist_ok=True)
    bundle.release()


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A new directory beside `path` that takes its place at the end, at once.

    Raises:
        BundleError: it cannot be written.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        try:
            yield work
            work.chmod(0o755)  # mkdtemp made it private
            if path.exists():
                remove_bundle(path)
            work.rename(path)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise BundleError(
            f"the bundle could not be written to {path.parent}: {error}; free space or set "
            "GIRIH_CACHE_DIR to another place"
        ) from error


@one_at_a_time
def lower_and_partition(traced: Traced, opt: OptConfig, target: Target) -> tuple[Lowered, Program]:
    """The stages between tracing and compiling.

    Raises:
        PassError: as `lower`.
        TraceError: as `partition`, and as `verify_rows`: a tile mixes the tokens of a step.
    """
    lowered = lower(traced, opt, target)
    program = partition(lowered.graph, lowered.weights, traced.constants)
    rows = verify_rows(program, traced.symbols, traced.spec.architecture)
    return lowered, replace(program, rows=rows)


def _look_up(path: Path, key: BundleKey, explicit: bool, verified: bool) -> Bundle | str:
    """The bundle at `path`, or why it cannot be used.

    Args:
        path: its directory.
        key: what it must have been built from.
        explicit: the user named it, so that it is refused instead of replaced.
        verified: its passes and tiles must have been verified.
    """
    found = read_key(path)
    if found is None and not (path / MANIFEST).exists():
        if explicit and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BundleError(
                f"{path} is not a bundle and not an empty directory; name an empty or new one"
            )
        return "no bundle for this key"
    if found is not None and found.digest != key.digest:
        differences = "; ".join(found.differences(key)[:4])
        if explicit:
            raise BundleError(
                f"bundle {path} was built for something else: {differences}. Build one with "
                "`girih compile bundle=DIR`, or leave out bundle= to use the cache"
            )
        return f"the key differs: {differences}"
    try:
        bundle = open_bundle(path)
    except BundleError as error:
        return str(error)
    if verified and not any(result.level == "passes" for result in bundle.verified):
        return "the bundle was built without opt.verify"
    return bundle


@contextmanager
def _exclusive(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a bundle path, so that two processes build one bundle."""
    with ExitStack() as held:
        try:
            waiting = ProgressEvent("compile", 0, None, "another process compiles this model")
            held.enter_context(locked(path, lambda: progress(waiting)))
        except OSError as error:
            raise BundleError(
                f"bundles cannot be written to {path.parent}: {error}; set GIRIH_CACHE_DIR to a "
                "writable place, or bundle=DIR"
            ) from error
        yield


class _Build:
    """One build: stages in order, kernel library and compile processes beside them or after."""

    def __init__(
        self,
        spec: ModelSpec,
        opt: OptConfig,
        target: Target,
        key: BundleKey,
        progress: Progress,
        observer: BuildObserver,
    ) -> None:
        if not opt.compile:
            raise ConfigError(f"opt={opt.level} compiles nothing, so it has no bundle; use opt=O2")
        self.spec, self.opt, self.target, self.key = spec, opt, tuned(target, opt), key
        self.progress, self.observer = progress, observer
        self.seconds: dict[str, float] = {}
        self.donor = ""

    def run(self, path: Path) -> None:
        """Build in a temporary directory beside `path`, then put it in place at once."""
        with _replaced(path) as work:
            front = self._front() if self.observer.waits_for_split else None
            # One process more than cores: a job fills the time in which others wait for disk.
            with CompilePool(self.target.threads + 1) as pool, ThreadPoolExecutor(1) as background:
                self.observer.started(lambda: _stop(pool))
                library = background.submit(self._build_library, work / LIBRARY)
                lowered, program = front or self._front()
                self._compile_tiles(pool, program, work)
                self._finish(library)
            save_file(program.constants, work / "constants.safetensors")
            verified = (*program.verified, *self._verified(lowered, work))
            seal(work, self.key, self._description(lowered, program, verified))

    def _front(self) -> tuple[Lowered, Program]:
        with no_collection():
            with timed(self.seconds, "trace"):
                traced = trace(self.spec, self.progress)
            self.progress(ProgressEvent("lower", 0, None, self.opt.level))
            with timed(self.seconds, "lower"):
                lowered, program = lower_and_partition(traced, self.opt, self.target)
        if program.rows is not None:
            self.seconds["rows"] = program.rows.seconds
            self.seconds["lower"] -= program.rows.seconds
        self.observer.split(program)
        return lowered, program

    def _verified(self, lowered: Lowered, work: Path) -> list[VerifyResult]:
        """The passes and, where this machine runs their instructions, the compiled tiles."""
        if not self.opt.verify:
            return []
        results = [r.verified for r in lowered.records if r.verified is not None]
        passes = worst_of("passes", f"values before and after {len(results)} passes", results)
        reason = why_not_runnable(self.target.isa)
        if reason:
            return [passes, VerifyResult("tiles", "", skipped=reason)]
        self.progress(ProgressEvent("verify", 0, None, "tiles against their graphs"))
        # Without the model's roundings a bfloat16 tile ends up to 4 % away from its graph.
        factor = 5.0 if self.opt.fast_math else 1.0
        with timed(self.seconds, "verify"):
            tiles = verify_tiles(work, factor)
        return [passes, worst_of("tiles", f"{len(tiles)} tiles, compiled and eager", tiles)]

    def _compile_tiles(self, pool: CompilePool, program: Program, work: Path) -> None:
        (work / "tiles").mkdir()
        jobs = []
        for tile in sorted(program.tiles.values(), key=lambda t: -len(t.text)):
            write_tile(tile.graph, tile_graph(work, tile.key))
            jobs.append((tile_graph(work, tile.key), tile_package(work, tile.key)))
        total = len(jobs)
        self.progress(ProgressEvent("compile", 0, total, f"tile 1 of {total}"))
        finished: list[str] = []

        def done(package: Path, seconds: float) -> None:
            self.seconds[f"tile {package.stem}"] = seconds
            self.observer.finished(Part(package.stem, package))
            finished.append(package.stem)
            count = len(finished)
            following = f"tile {min(count + 1, total)} of {total}"
            self.progress(ProgressEvent("compile", count, total, following))

        with timed(self.seconds, "compile"):
            pool.compile(jobs, self.target, done)

    def _build_library(self, path: Path) -> None:
        with timed(self.seconds, "kernels"):
            donor = copy_library(bundle_dir(), self.key, path)
            if donor is None:
                build_library(self.target.isa, path)
            else:
                self.donor = donor.name
                log.info("kernel library taken from bundle %s", donor.name)
        self.observer.finished(Part(None, path))

    def _finish(self, library: Future[None]) -> None:
        if not library.done():
            self.progress(ProgressEvent("kernels", 0, None, "kernel library"))
        error = library.exception()
        if error:
            raise error if isinstance(error, CompileError) else CompileError(str(error))
        if self.donor:
            words = f"kernel library taken from bundle {self.donor}"
            self.progress(ProgressEvent("kernels", 1, 1, words))

    def _description(
        self, lowered: Lowered, program: Program, verified: tuple[VerifyResult, ...]
    ) -> dict[str, Any]:
        return {
            "model": self.spec.name,
            "layout": program.layout.to_json(),
            "weights": program.weights.to_json(),
            "notes": {tile.key: tile.note for tile in program.tiles.values()},
            "report": lowered.report(),
            "verified": [asdict(result) for result in verified],
            "donor": self.donor,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
        }


def _stop(pool: CompilePool) -> None:
    """End every compiler of a build."""
    pool.kill()
    stop_builds()
