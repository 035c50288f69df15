"""Fixtures of the front-end tests: a real server over a fake model, on a real socket."""

from pathlib import Path

import pytest
from support_serving import RunningServer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Directory of the real SmolLM2, if it was fetched before (nothing is downloaded here)."""
    from girih.kernels.base.cache_dir import cache_dir

    for path in sorted((cache_dir() / "models").glob("smollm2-*")):
        if (path / "tokenizer.json").exists():
            return path
    pytest.skip("SmolLM2 is not in the cache; `girih fetch model=smollm2` gets it")


@pytest.fixture(scope="module")
def shared_server():
    """One server for tests that only ask; its blocks are checked at the end."""
    with RunningServer() as server:
        yield server


@pytest.fixture
def new_server():
    """Factory of servers of a test's own; each is checked and stopped at the end."""
    made = []

    def make(**options):
        made.append(RunningServer(**options).__enter__())
        return made[-1]

    yield make
    for server in made:
        server.__exit__(None, None, None)


@pytest.fixture(scope="session")
def tiny_server():
    """URL of `girih serve` in its own process over a tiny random Llama, without compilation."""
    from support_tiny_server import running_tiny_server

    with running_tiny_server() as url:
        yield url
