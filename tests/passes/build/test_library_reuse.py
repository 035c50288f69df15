"""The kernel library of one bundle serves another that was built from the same entries."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support_models import opt_o2, tiny_spec

from girih.graph.bundle.files import MANIFEST, check_files, remove_bundle
from girih.kernels.base.target import Target
from girih.passes.build import build, key

TARGET = Target("cpu", "avx2", 2, "g++")
SPECS = {
    "one": lambda: tiny_spec("llama"),
    "two": lambda: tiny_spec("llama", rms_norm_eps=1e-5),
    "three": lambda: tiny_spec("llama", rms_norm_eps=1e-4),
}


@pytest.fixture
def compiled(empty_tiles, monkeypatch):
    """Instruction sets of the libraries that were compiled; tiles are empty files."""
    compiled = []

    def build_library(isa, path):
        compiled.append(isa)
        path.write_bytes(f"library for {isa}, number {len(compiled)}".encode())

    monkeypatch.setattr(build, "build_library", build_library)
    return compiled


def built(name, target=TARGET, bundle=None, **options):
    place = build.Place(bundle)
    bundle, how = build.find_or_build(SPECS[name](), opt_o2(), target, place, **options)
    assert how.status == "built"
    check_files(bundle.path)
    assert [p for p in bundle.path.iterdir() if p.name.startswith(".")] == []
    return bundle


def test_a_second_model_compiles_no_library_and_says_where_it_is_from(compiled):
    events = []
    one = built("one")
    two = built("two", progress=events.append)
    assert compiled == ["avx2"]
    assert (one.donor, two.donor) == ("", one.path.name)
    assert two.library.read_bytes() == one.library.read_bytes()
    words = f"kernel library taken from bundle {one.path.name}"
    assert [e.detail for e in events if e.stage == "kernels"][-1] == words
    assert 0 < two.seconds["kernels"] < 5


def test_neither_bundle_needs_the_other(compiled):
    one = built("one")
    two = built("two")
    remove_bundle(one.path)
    check_files(two.path)
    assert not two.library.samefile(built("one").library)
    assert compiled == ["avx2"]  # and back from the second one


def test_a_named_bundle_outside_the_cache_takes_from_the_cache(compiled, tmp_path):
    one = built("one")
    assert built("two", bundle=str(tmp_path / "elsewhere")).donor == one.path.name
    assert built("three").donor == one.path.name
    assert compiled == ["avx2"]


@pytest.mark.parametrize(
    "changes", [{"isa": "avx512"}, {"compiler": "clang++"}], ids=["isa", "compiler"]
)
def test_another_target_compiles_its_own(compiled, changes):
    built("one")
    target = dataclasses.replace(TARGET, **changes)
    assert built("two", target).donor == ""
    assert compiled == ["avx2", target.isa]


@pytest.mark.parametrize("what", ["kernels", "torch"])
def test_other_sources_or_another_torch_compile_anew(compiled, monkeypatch, what):
    built("one")
    if what == "kernels":
        monkeypatch.setattr(key, "source_digest", lambda: "f" * 64)
    else:
        right = key.importlib.metadata.version
        monkeypatch.setattr(
            key.importlib.metadata, "version", lambda n: "9.9" if n == "torch" else right(n)
        )
    assert built("two").donor == ""
    assert compiled == ["avx2", "avx2"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda bundle: bundle.library.write_bytes(b"something else"),
        lambda bundle: bundle.library.unlink(),
        lambda bundle: (bundle.path / MANIFEST).write_text("{"),
        lambda bundle: (bundle.path / MANIFEST).write_text("{}"),
        lambda bundle: (bundle.path / MANIFEST).write_text("[]"),
        lambda bundle: (bundle.path / MANIFEST).unlink(),
    ],
)
def test_a_damaged_bundle_gives_nothing(compiled, damage):
    damage(built("one"))
    assert built("two").donor == ""
    assert compiled == ["avx2", "avx2"]


def test_two_builds_at_once_take_from_the_same_bundle(compiled, monkeypatch):
    one = built("one")
    together = threading.Barrier(2, timeout=60)
    right = build.copy_library

    def at_once(*args):
        together.wait()
        return right(*args)

    monkeypatch.setattr(build, "copy_library", at_once)
    with ThreadPoolExecutor(2) as pool:
        two, three = pool.map(built, ("two", "three"))
    assert two.donor == three.donor == one.path.name
    assert compiled == ["avx2"]
