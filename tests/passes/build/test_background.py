"""Building behind a serving engine: what is taken in, when, and what failures do."""

import threading

import pytest
from support_models import program_of, tiny_traced

import girih.passes.build.background as background
from girih.graph.bundle.bundle import BundleOrigin
from girih.kernels.base.errors import BundleError, CompileError, TraceError
from girih.kernels.base.progress import ProgressEvent
from girih.passes.build.background import BackgroundBuild, Part

BUNDLE = object()


class Engine:
    """Notes what an executable is told."""

    def __init__(self):
        self.told = []

    def replace_tile(self, key, tile):
        self.told.append((key, tile))

    def choose_attention(self):
        self.told.append("attention")


@pytest.fixture
def program():
    return program_of(tiny_traced("llama"))


@pytest.fixture(autouse=True)
def loaders(monkeypatch):
    def load(path):
        if not path.exists():
            raise BundleError(f"{path} is missing")
        return f"code of {path.name}"

    monkeypatch.setattr(background, "load_tile", load)
    monkeypatch.setattr(background, "load_library", load)


def build_of(work, events=None):
    return BackgroundBuild(work, (events if events is not None else []).append)


def test_a_bundle_that_was_found_needs_no_pieces():
    build = build_of(lambda observer, progress: (BUNDLE, BundleOrigin("found")))
    assert build.program() is None
    assert build.result() == (BUNDLE, BundleOrigin("found"))


def test_parts_are_taken_in_as_they_finish(program, tmp_path):
    keys = sorted(program.tiles)
    go_on = threading.Event()

    def work(observer, progress):
        observer.split(program)
        for name in (keys[0], "kernels", *keys[1:]):
            path = tmp_path / name
            path.touch()
            observer.finished(Part(None if name == "kernels" else name, path))
            if name == "kernels":
                go_on.wait(20)
        return BUNDLE, BundleOrigin("built", "no bundle for this key")

    build, engine = build_of(work), Engine()
    assert build.program() is program
    while build.taken < 2:
        assert build.take_in(engine)
    assert engine.told == [(keys[0], f"code of {keys[0]}"), "attention"]
    go_on.set()
    build.result()
    assert not build.take_in(engine)
    assert [entry[0] for entry in engine.told[2:]] == keys[1:]
    assert build.taken == build.total == 1 + len(keys)


def test_a_part_is_found_after_the_bundle_was_put_in_place(program, tmp_path):
    key = next(iter(program.tiles))
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / key).touch()

    class Bundle:
        library = tmp_path / "kernels.so"

        @staticmethod
        def package(name):
            return tmp_path / "final" / name

    def work(observer, progress):
        observer.split(program)
        observer.finished(Part(key, tmp_path / "work" / key))
        return Bundle, "built"

    build, engine = build_of(work), Engine()
    build.result()
    build.take_in(engine)
    assert engine.told == [(key, f"code of {key}")]


def test_a_failure_before_the_split_is_the_caller_s():
    def work(observer, progress):
        raise TraceError("no such model")

    with pytest.raises(TraceError, match="no such model"):
        build_of(work).program()


def test_a_failure_after_the_split_leaves_eager_pieces(program, caplog):
    def work(observer, progress):
        observer.split(program)
        raise CompileError("no compiler")

    build = build_of(work)
    assert build.program() is program
    with pytest.raises(CompileError, match="no compiler"):
        build.result()
    assert not build.take_in(Engine())
    assert "eager pieces go on answering: no compiler" in caplog.text


def test_finished_parts_of_a_failed_build_are_left(program, tmp_path):
    def work(observer, progress):
        observer.split(program)
        observer.finished(Part(None, tmp_path / "gone.so"))
        raise CompileError("a tile failed")

    build, engine = build_of(work), Engine()
    with pytest.raises(CompileError):
        build.result()
    assert not build.take_in(engine)
    assert engine.told == []


def test_a_part_that_cannot_be_loaded_leaves_eager_pieces(program, tmp_path, caplog):
    def work(observer, progress):
        observer.split(program)
        observer.finished(Part("a", tmp_path / "gone"))
        raise CompileError("no room left")

    engine = Engine()
    build = build_of(work)
    build.program()
    while build.take_in(engine):
        pass
    with pytest.raises(CompileError):
        build.result()
    assert engine.told == []
    assert "eager pieces go on" in caplog.text


def test_a_build_cancelled_early_is_stopped_when_it_starts(program):
    may_start, stopped = threading.Event(), threading.Event()

    def work(observer, progress):
        assert may_start.wait(20)
        observer.started(stopped.set)
        return BUNDLE, "built"

    build = build_of(work)
    canceller = threading.Thread(target=build.cancel)
    canceller.start()
    may_start.set()
    canceller.join()
    build.result()
    assert stopped.is_set()


def test_progress_reaches_the_caller_until_pieces_can_run(program):
    def work(observer, progress):
        progress(ProgressEvent("trace", 0, None))
        observer.split(program)
        progress(ProgressEvent("compile", 0, 3))
        return BUNDLE, "built"

    events = []
    build = build_of(work, events)
    build.result()
    assert [event.stage for event in events] == ["trace"]


def test_cancel_ends_the_build(program):
    stopped = threading.Event()

    def work(observer, progress):
        observer.started(stopped.set)
        observer.split(program)
        assert stopped.wait(20)
        raise CompileError("the process that compiles tiles ended")

    build = build_of(work)
    build.program()
    build.cancel()
    assert stopped.is_set()
    assert isinstance(build.error, CompileError)
