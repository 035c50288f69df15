"""Faults of the machine around a start: what is said, and that nothing half-made stays behind."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from support_models import opt_o2, tiny_spec

from girih.graph.bundle.bundle import BundleOrigin
from girih.graph.tiles import inductor
from girih.kernels.base.errors import BundleError, CompileError
from girih.kernels.base.target import Target
from girih.passes.build import build, key

TARGET = Target("cpu", "avx2", 2, "g++")


@pytest.fixture
def quick(empty_tiles, monkeypatch):
    """Builds of empty files, the kernel library too."""
    monkeypatch.setattr(build, "build_library", lambda isa, path: path.write_bytes(b"so"))
    return empty_tiles


def find_or_build(**place):
    return build.find_or_build(tiny_spec("llama"), opt_o2(), TARGET, build.Place(**place))


def left_in(directory):
    return [p for p in directory.iterdir() if p.is_dir()]


@pytest.mark.parametrize("stage", ["write_tile", "save_file", "seal"])
def test_a_disk_that_fills_up_leaves_nothing_and_a_second_try_succeeds(quick, monkeypatch, stage):
    right = getattr(build, stage)

    def full(*args, **options):
        right(*args, **options)  # the last file is there, but not whole
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, stage, full)
    with pytest.raises(BundleError, match=r"No space left on device; free space or set"):
        find_or_build()
    assert left_in(quick) == []
    monkeypatch.setattr(build, stage, right)
    bundle, how = find_or_build()
    assert how.status == "built"
    assert find_or_build()[1].status == "found"
    assert left_in(quick) == [bundle.path]


def test_a_killed_compiler_leaves_nothing(quick, monkeypatch):
    def killed(self, jobs, target, done):
        jobs[0][1].write_bytes(b"half")
        raise CompileError("the process that compiles tiles ended with exit code -9")

    monkeypatch.setattr(build.CompilePool, "compile", killed)
    with pytest.raises(CompileError, match="exit code -9"):
        find_or_build()
    assert left_in(quick) == []


@pytest.mark.parametrize("variable", ["GIRIH_CACHE_DIR", "HOME"])
@pytest.mark.parametrize("place", ["/dev/null", "/proc/1/task"])
def test_a_place_that_cannot_be_written_is_named(quick, monkeypatch, variable, place):
    monkeypatch.delenv("GIRIH_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(variable, place)
    with pytest.raises(BundleError, match=rf"cannot be written to {place}.*set GIRIH_CACHE_DIR"):
        find_or_build()


def test_a_named_place_where_no_lock_can_be_made_is_refused(quick):
    with pytest.raises(BundleError, match="cannot be written to /proc"):
        find_or_build(bundle="/proc/bundle")


def test_an_unwritable_home_does_not_matter_when_the_bundle_is_named(quick, monkeypatch, tmp_path):
    monkeypatch.delenv("GIRIH_CACHE_DIR")
    monkeypatch.setenv("HOME", "/dev/null")
    assert find_or_build(bundle=str(tmp_path / "here"))[1].status == "built"
    assert find_or_build(bundle=str(tmp_path / "here"))[1].status == "found"


def test_a_cache_that_became_read_only_serves_what_it_has(quick, monkeypatch):
    bundle, _ = find_or_build()

    def refuse(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    again, how = find_or_build()
    assert (again.path, how.status) == (bundle.path, "found")


def test_two_versions_of_girih_share_a_cache(quick, monkeypatch):
    def version(name):
        monkeypatch.setattr(key, "compiler_digest", lambda: name)
        return find_or_build()

    mine, _ = version("one")
    theirs, how = version("another")
    assert how == BundleOrigin("built", "no bundle for this key")
    assert [version(name)[0].path for name in ("one", "another")] == [mine.path, theirs.path]
    assert version("one")[1].status == "found"
    assert sorted(left_in(quick)) == sorted([mine.path, theirs.path])


def test_a_full_cache_drops_what_was_used_longest_ago(quick, monkeypatch):
    first, _ = find_or_build()
    monkeypatch.setattr(key, "compiler_digest", lambda: "another version")
    second, _ = find_or_build(cache_bytes=1)
    assert sorted(left_in(quick)) == sorted([first.path, second.path]), "it is still in use"
    first.release()
    monkeypatch.setattr(key, "compiler_digest", lambda: "a third version")
    third, _ = find_or_build(cache_bytes=1)
    assert sorted(left_in(quick)) == sorted([second.path, third.path])
    assert not first.path.exists()


@pytest.mark.parametrize(
    ("name", "here"), [("target.isa", "avx512"), ("torch", "9.9"), ("transformers", "1.0")]
)
def test_a_bundle_for_something_else_is_refused_with_both_values(quick, tmp_path, name, here):
    bundle, _ = find_or_build(bundle=str(tmp_path / "b"))
    entries = json.loads((bundle.path / "key.json").read_text())
    was = dict(entries)[name]
    changed = [[n, here if n == name else v] for n, v in entries]
    (bundle.path / "key.json").write_text(json.dumps(changed))
    told = re.escape(f"built for something else: {name}: {here} → {was}")
    with pytest.raises(BundleError, match=told):
        find_or_build(bundle=str(tmp_path / "b"))


class TestCodeThatCannotBeLoaded:
    """Temporary directories mounted noexec, and damaged packages."""

    @pytest.fixture
    def loader(self, monkeypatch):
        """A loader that fails unless the package is unpacked below `works`."""

        def use(works):
            def load(path):
                place = os.environ.get("TMPDIR", "/tmp")
                if works is None or not place.startswith(str(works)):
                    raise RuntimeError(f"Error in dlopen: {place}/x.so: failed to map segment")
                return lambda inputs: inputs

            monkeypatch.setattr(inductor, "_load_package", load)

        return use

    def test_it_is_unpacked_beside_the_bundle(self, loader, tmp_path, monkeypatch):
        monkeypatch.setenv("TMPDIR", "/mounted/noexec")
        loader(tmp_path)
        assert inductor.load_tile(tmp_path / "t.pt2")([1]) == [1]
        assert os.environ["TMPDIR"] == "/mounted/noexec"
        assert list(tmp_path.iterdir()) == []

    def test_the_remedy_is_said_when_that_fails_too(self, loader, tmp_path, monkeypatch):
        monkeypatch.delenv("TMPDIR", raising=False)
        loader(None)
        with pytest.raises(BundleError, match=r"noexec.*set TMPDIR to a directory that does"):
            inductor.load_tile(tmp_path / "t.pt2")
        assert "TMPDIR" not in os.environ

    def test_a_damaged_package_is_named(self, tmp_path):
        (tmp_path / "t.pt2").write_bytes(b"no archive")
        with pytest.raises(BundleError, match=r"tile .*t\.pt2 cannot be loaded"):
            inductor.load_tile(tmp_path / "t.pt2")
