"""A build behind a serving engine: how far it is, its canary, and what a failing one does."""

import dataclasses
import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support_models import opt_o2, tiny_model, tiny_traced

import girih.passes.build.background as background
import girih.runtime.start.serving_build as serving_build
from girih.graph.bundle.bundle import BundleOrigin
from girih.graph.execute.executable import Executable
from girih.graph.files.sources import resolve_source
from girih.graph.ir.tile_file import write_tile
from girih.graph.ir.verify_result import VerifyResult
from girih.graph.tiles.count import COMPILES
from girih.graph.tiles.inductor import eager_tile
from girih.graph.weights.checkpoint import open_checkpoint
from girih.graph.weights.load import load_weights
from girih.kernels.base.errors import CapacityError, CompileError
from girih.kernels.base.target import Target, detect_isa
from girih.passes.build.background import Part
from girih.passes.build.build import lower_and_partition
from girih.runtime.start import launch
from girih.runtime.start.assembly import watch_compiling
from girih.runtime.start.runnable_program import RunnableProgram
from girih.runtime.start.serving_build import ServingBuild
from girih.runtime.verify.canary import executable_for_canary, verify_canary

VOCAB, BLOCK, WAIT = 424, 16, 30


@dataclasses.dataclass
class SmallBundle:
    """What the canary and the build read of a bundle."""

    path: Path
    layout: object
    released: int = 0

    def release(self):
        self.released += 1


@functools.cache
def program():
    target = Target("cpu", detect_isa(), 2, "g++")
    return lower_and_partition(tiny_traced("llama"), opt_o2(), target)[1]


@functools.cache
def weights():
    with open_checkpoint(resolve_source(str(tiny_model("llama")))) as checkpoint:
        return load_weights(program().weights, checkpoint, program().constants, detect_isa())


def pieces():
    return {key: eager_tile(tile.graph) for key, tile in program().tiles.items()}


class Compiled:
    """Stands for a tile's compiled code; `factor` 1 computes what it should."""

    def __init__(self, key, factor):
        self._right, self._factor = pieces()[key], factor

    def __call__(self, inputs):
        return [value * self._factor for value in self._right(inputs)]


class Setting:
    """An engine's executable on eager pieces, and a build whose parts appear when told to."""

    def __init__(self, folder, monkeypatch, factor=1.0, error=None):
        self.may_build, self.may_end = threading.Event(), threading.Event()
        (folder / "tiles").mkdir()
        for key, tile in program().tiles.items():
            write_tile(tile.graph, folder / "tiles" / f"{key}.json")
        self.bundle = SmallBundle(folder, program().layout)
        self.error, self.folder = error, folder
        self.code = {key: Compiled(key, factor) for key in program().tiles}
        monkeypatch.setattr(background, "load_tile", lambda path: self.code[path.name])
        monkeypatch.setattr(background, "load_library", lambda path: None)
        self.pieces = pieces()
        self.executable = Executable(
            program().layout, dict(self.pieces), weights(), 5, BLOCK, torch.float32, "reference"
        )
        self.build = ServingBuild(self.work, lambda event: None)
        self.core = SimpleNamespace(
            is_running=False, recomputed=0, recompute=self.recompute, closers=[]
        )
        watch_compiling(self.core, self.executable, self.build)
        self.build.program()
        self.build.serve(self.pieces, self.check)

    def work(self, observer, progress):
        observer.split(program())
        COMPILES.note(len(program().tiles))
        assert self.may_build.wait(WAIT)
        if self.error:
            raise self.error
        for name in (*program().tiles, "kernels.so"):
            (self.folder / name).touch()
            observer.finished(Part(None if name == "kernels.so" else name, self.folder / name))
        assert self.may_end.wait(WAIT)
        return self.bundle, "built"

    def check(self, bundle):
        beside = executable_for_canary(
            self.executable, bundle, weights(), dict(self.code), "reference"
        )
        return verify_canary(beside, bundle, weights(), VOCAB)

    def recompute(self):
        self.core.recomputed += 1

    def tend_until(self, phase):
        """Let an idle core run its idle hook until the build is in `phase`."""
        deadline = threading.Event()
        for _ in range(WAIT * 100):
            if self.core.idle_hook is not None:
                self.core.idle_hook(self.core)
            if self.build.state().phase == phase:
                return self.build.state()
            deadline.wait(0.01)
        raise AssertionError(self.build.state())

    @property
    def running(self):
        """Keys of the tiles that run compiled."""
        return {k for k, tile in self.executable._tiles.items() if tile is self.code[k]}


def test_an_idle_engine_takes_tiles_in_and_the_canary_runs(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch)
    total = len(program().tiles)
    before = setting.tend_until("compiling")
    assert (before.tiles, before.total_tiles) == (0, total)
    setting.may_build.set()
    while setting.build.state().tiles < total:
        setting.tend_until("compiling")
    assert setting.running == set(program().tiles)
    setting.may_end.set()
    done = setting.tend_until("done")
    assert "12 tokens as eager code, recorded" in done.detail
    assert done.seconds == setting.build.state().seconds > 0  # the clock stands still
    assert setting.core.idle_hook is None
    assert setting.core.recomputed == 0
    assert setting.core.count_recompiles() == 0


@pytest.mark.parametrize("seconds", [0.1, WAIT])
def test_compilers_start_when_eager_pieces_have_answered_or_nobody_asks(seconds, monkeypatch):
    is_split = threading.Event()

    def work(observer, progress):
        observer.split(program())
        is_split.set()
        raise CompileError("no compiler")

    monkeypatch.setattr(serving_build, "FIRST_ANSWER_SECONDS", seconds)
    build = ServingBuild(work, lambda event: None)
    assert build.program() is program()
    assert not is_split.wait(0.1)
    build.serve({}, lambda bundle: VerifyResult("canary", "nothing"))
    if seconds > 1:  # no step was asked for, then one runs, then it is over
        core = SimpleNamespace(is_running=False)
        build.tend(core, None)
        build.before_step(None)
        assert not is_split.wait(0.1)
        build.tend(core, None)
    assert is_split.wait(WAIT / 2)


def test_a_build_nobody_serves_beside_can_be_cancelled():
    split: Any = lambda observer, progress: observer.split(program())  # noqa: E731
    build = ServingBuild(split, lambda event: None)
    build.program()
    build.cancel()
    assert not build._thread.is_alive()


def test_a_failing_canary_brings_the_eager_pieces_back(tmp_path, monkeypatch, caplog):
    setting = Setting(tmp_path, monkeypatch, factor=1.05)
    setting.may_build.set()
    while setting.build.state().tiles < len(program().tiles):
        setting.tend_until("compiling")
    setting.may_end.set()
    setting.tend_until("failed")
    while setting.core.idle_hook is not None:
        setting.core.idle_hook(setting.core)
    state = setting.build.state()
    assert (state.phase, state.tiles) == ("failed", 0)
    assert "canary FAILED" in state.detail
    assert setting.running == set()
    assert {c.backend.name for c in setting.executable.backends} == {"reference"}
    assert setting.core.recomputed == 1
    assert "COMPILED CODE IS REJECTED" in caplog.text
    assert not setting.build.take_in(setting.executable)


def test_a_canary_that_does_not_run_is_one_that_failed(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch)

    def check(bundle):
        raise RuntimeError("can't allocate memory")

    setting.build.serve(setting.pieces, check)
    setting.may_build.set()
    setting.may_end.set()
    while setting.core.idle_hook is not None:
        setting.core.idle_hook(setting.core)
    state = setting.build.state()
    assert state.phase == "failed"
    assert "the canary did not run: RuntimeError: can't allocate memory" in state.detail
    assert setting.running == set()


def test_closing_the_core_ends_the_build(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch)
    setting.may_build.set()
    setting.may_end.set()
    (close,) = setting.core.closers
    setting.build._thread.join(WAIT)
    assert setting.bundle.released == 0
    close()
    assert not setting.build._thread.is_alive()
    assert setting.bundle.released == 1


def test_an_engine_that_cannot_be_bound_ends_its_build(monkeypatch):
    build = SimpleNamespace(cancelled=0)
    build.cancel = lambda: setattr(build, "cancelled", build.cancelled + 1)

    def bind(start, program):
        raise CapacityError("no room")

    monkeypatch.setattr(launch, "bind", bind)
    origin = BundleOrigin("none")
    bare = RunnableProgram(program().layout, {}, program().weights, {}, "eager", origin, {}, None)
    with pytest.raises(CapacityError, match="no room"):
        launch.engine_of(None, dataclasses.replace(bare, build=build))
    with pytest.raises(CapacityError):
        launch.engine_of(None, bare)
    assert build.cancelled == 1


def test_a_running_engine_is_tended_by_its_steps(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch)
    setting.core.is_running = True
    setting.may_build.set()
    setting.may_end.set()
    setting.core.idle_hook(setting.core)
    assert setting.running == set()
    while setting.build.take_in(setting.executable):
        pass
    assert setting.running == set(program().tiles)
    assert setting.build.state().phase == "done"


def test_a_build_that_fails_says_so(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch, error=CompileError("no compiler"))
    setting.may_build.set()
    state = setting.tend_until("failed")
    assert (state.tiles, state.detail) == (0, "no compiler")
    setting.tend_until("failed")
    assert setting.core.recomputed == 0


def test_compiling_while_serving_is_counted(tmp_path, monkeypatch):
    setting = Setting(tmp_path, monkeypatch)
    setting.may_build.set()
    setting.may_end.set()
    setting.tend_until("done")
    COMPILES.note(2)
    assert setting.core.count_recompiles() == 2


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_recomputing_changes_no_token(new_core, async_scheduling):
    from support_core import collect, make_request, run_to_end

    def add(core):
        for name in "abc":
            core.add_request(make_request(name, 20, max_tokens=30))

    plain = new_core(async_scheduling=async_scheduling)
    add(plain)
    expected = {name: entry.tokens for name, entry in run_to_end(plain).items()}
    core = new_core(async_scheduling=async_scheduling)
    add(core)
    collected = {}
    for step in range(500):
        if not core.has_work():
            break
        collect(collected, core.step())
        if step in (0, 7, 12):
            core.recompute()
            core.check_integrity()
    assert {name: entry.tokens for name, entry in collected.items()} == expected
    assert core.stats().num_preemptions > 0
    plain.close()
    core.close()
