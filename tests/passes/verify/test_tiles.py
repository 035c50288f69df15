"""Tiles verified: wrong results are refused with the tile and the result that differs."""

import json
import re
import subprocess
import types
from dataclasses import asdict, replace

import pytest
import torch
from support_models import program_of, tiny_traced

from girih.graph.ir.verify_result import VerifyResult
from girih.graph.tiles.inductor import eager_tile
from girih.kernels.base.errors import CompileError
from girih.passes.verify.tiles import verify_tile, verify_tiles


@pytest.fixture(params=["float32", "bfloat16"])
def tile(request):
    tiles = program_of(tiny_traced("llama", dtype=request.param)).tiles
    return list(tiles.values())[1]


def test_a_right_tile_is_verified_for_many_tokens_and_for_one(tile):
    seen = []
    right = eager_tile(tile.graph)

    def compiled(inputs):
        seen.append(max(x.shape[0] for x in inputs if x.ndim == 3 and x.shape[1] == 4))
        return right(inputs)

    result = verify_tile(tile.key, tile.graph, compiled)
    assert result.passed and result.error == 0.0
    assert seen == [13, 1]


@pytest.mark.parametrize(
    "spoil", [lambda x: x * 1.05, lambda x: x * torch.nan, lambda x: x.flip(-1)]
)
def test_a_wrong_result_is_refused(tile, spoil):
    right = eager_tile(tile.graph)

    def compiled(inputs):
        first, *rest = right(inputs)
        return [spoil(first), *rest]

    result = verify_tile(tile.key, tile.graph, compiled)
    assert not result.passed and not result.error <= result.bound
    assert f"tiles FAILED: tile {tile.key}, compiled and eager" in result.as_text()
    assert re.fullmatch(r"result .+ of \S+ \(\w+\) with sizes .*", result.first_difference)


def answer(monkeypatch, stdout="", code=0, stderr=""):
    done = types.SimpleNamespace(stdout=stdout, stderr=stderr, returncode=code)
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)


def test_the_answer_of_the_process(monkeypatch, tmp_path):
    right = VerifyResult("tiles", "tile t, compiled and eager", 1e-7, 1e-5, 0.5)
    answer(monkeypatch, json.dumps([asdict(right)]))
    assert verify_tiles(tmp_path) == [right]
    wrong = replace(right, error=float("inf"), first_difference="result x")
    answer(monkeypatch, json.dumps([asdict(right), asdict(wrong)]))
    with pytest.raises(CompileError, match=r"tile t, .* first difference: result x\. opt=O0 runs"):
        verify_tiles(tmp_path)


def test_code_that_crashes_is_told(monkeypatch, tmp_path):
    answer(monkeypatch, code=-11, stderr="Segmentation fault")
    with pytest.raises(CompileError, match=r"exit code -11:\nSegmentation fault"):
        verify_tiles(tmp_path)


def test_the_process_says_what_is_missing(tmp_path):
    with pytest.raises(CompileError, match=r"kernels\.so does not exist"):
        verify_tiles(tmp_path)
