"""Counting compilations, and forbidding them."""

import pytest
from support_graphs import TARGET

from girih.graph.tiles.count import COMPILES, CompileCount
from girih.graph.tiles.pool import CompilePool
from girih.kernels.base.errors import EngineError


def test_tiles_are_counted():
    count = CompileCount()
    count.note(3)
    count.note(2)
    assert count.total == 5


def test_compiling_while_serving_is_an_error():
    count = CompileCount()
    with count.forbidden(), pytest.raises(EngineError, match="2 tiles were about to be compiled"):
        count.note(2)
    assert count.total == 0
    count.note(1)
    assert count.total == 1


def test_the_pool_asks_before_it_compiles(tmp_path, monkeypatch):
    import subprocess
    import sys

    def start():
        command = [sys.executable, "-S", "-c", "input()"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    monkeypatch.setattr(CompilePool, "_start", staticmethod(start))
    before = COMPILES.total
    with COMPILES.forbidden(), pytest.raises(EngineError), CompilePool(1) as pool:
        pool.compile([(tmp_path / "t.json", tmp_path / "t.pt2")], TARGET, lambda p, s: None)
    assert COMPILES.total == before
