"""Every core made through the `new_core` fixture is checked for integrity after its test."""

from __future__ import annotations

import pytest
from support_core import make_core

_made: list = []


@pytest.fixture
def new_core():
    """Factory of cores over a fake runner (arguments of `support_core.make_core`)."""

    def make(*args, **kwargs):
        core = make_core(*args, **kwargs)
        _made.append(core)
        return core

    return make


@pytest.fixture(autouse=True)
def _integrity_after_each_test():
    _made.clear()
    yield
    for core in _made:
        core.check_integrity()
        pool = core.scheduler.kv_cache.pool
        if not core.has_work():
            assert pool.num_free == pool.num_usable, "blocks leaked"
        assert not getattr(core.runner, "violations", [])


@pytest.fixture(scope="session")
def process_llm():
    """An engine over a tiny Llama in a process of its own, with the plug-ins of the tests.

    Who changes its state (sleep, weights) restores it.
    """
    from support_models import tiny_model

    from girih import LLM

    llm = LLM(
        str(tiny_model("llama")),
        opt="O0",
        dtype="float32",
        num_blocks=64,
        threads=1,
        max_num_seqs=4,
        process="process",
        logits_processors=["support_processors:Staircase", "support_processors:Broken"],
    )
    yield llm
    llm.close()
