"""Fixtures of the pass tests."""

import pytest

from girih.kernels.target import Target
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


@pytest.fixture
def lowered_by():
    """Lower a traced model with only the named passes; gives (Lowered, rewrites by pass)."""

    def run(traced, *names, **options):
        opt = OptConfig(level="test", **options)
        for name in names:
            getattr(opt.passes, name).enabled = True
        lowered = lower(traced, opt, Target("cpu", "avx2", 2, "g++"))
        return lowered, {r.name: r.rewrites for r in lowered.records}

    return run
