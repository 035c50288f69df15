"""Fixtures of the pass tests."""

import pytest
from support_models import tiny_traced

from girih.kernels.base.target import Target
from girih.passes.build import build
from girih.passes.options import OptConfig
from girih.passes.runner import lower


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from this build"
    )


@pytest.fixture
def update_golden(request):
    # pytest knows the option when it is started on tests/passes or below.
    return request.config.getoption("--update-golden", default=False)


class EmptyTiles:
    """Stands for `CompilePool`: every package is a file of a few bytes."""

    def __init__(self, at_once):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def kill(self):
        pass

    def compile(self, jobs, target, done):
        for _, package in jobs:
            package.write_bytes(b"code")
            done(package, 0.1)


@pytest.fixture
def empty_tiles(monkeypatch, tmp_path):
    """Builds in a cache of their own whose tiles are empty files: no compiler runs, and the model
    was traced before. The kernel library is the test's. Gives the directory of bundles."""
    monkeypatch.setattr(build, "trace", lambda spec, progress: tiny_traced("llama"))
    monkeypatch.setattr(build, "CompilePool", EmptyTiles)
    monkeypatch.setattr(build, "require_compiler", lambda: None)
    monkeypatch.setenv("GIRIH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bundles"


@pytest.fixture
def lowered_by():
    """Lower a traced model with only the named passes; gives (Lowered, rewrites by pass). Texts
    are of `isa` "avx2" on every machine; a graph that is computed needs this machine's."""

    def run(traced, *names, isa="avx2", **options):
        opt = OptConfig(level="test", **options)
        for name in names:
            getattr(opt.passes, name).enabled = True
        lowered = lower(traced, opt, Target("cpu", isa, 2, "g++"))
        return lowered, {r.name: r.rewrites for r in lowered.records}

    return run
