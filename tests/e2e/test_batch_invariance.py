"""Bit-equal results whatever else is in the batch: compiled engines in random company."""

import os
import tempfile
from pathlib import Path

import pytest
from support_invariance import run_invariance
from support_models import tiny_model

from girih import LLM
from girih.kernels.base.errors import ConfigError

CACHE = Path(tempfile.gettempdir()) / f"girih-test-bundles-{os.getuid()}"
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 40, 47, 1, 5, 16, 26)
BASE = {"max_model_len": 128, "block_size": 16, "num_blocks": 200, "batch_invariant": True}


def company(dtype, **base):
    """Engines that serve the same requests in their own ways; the first one also serves alone."""
    base = {**BASE, "dtype": dtype, **base}
    return [
        {**base, "threads": 1},
        {**base, "threads": 2, "max_num_batched_tokens": 24},
        {**base, "threads": 2, "num_blocks": 10, "max_num_seqs": 7, "async_scheduling": False},
    ]


def check(answer):
    assert answer["different"] == []
    assert answer["compared"] > 50
    assert answer["distinct"] > 10
    assert answer["cached"] > 0
    assert answer["preemptions"] > 0


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tiny_models_give_the_same_bits_in_any_company(dtype):
    """Sizes that are no multiple of a vector, so that every loop has a rest."""
    model = tiny_model(
        "llama", num_hidden_layers=2, intermediate_size=100, hidden_size=72, head_dim=16
    )
    job = {"model": str(model), "options": company(dtype), "lengths": LENGTHS, "trials": 8}
    check(run_invariance(job, GIRIH_CACHE_DIR=str(CACHE)))


@pytest.mark.real_model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3_270m"])
def test_real_models_give_the_same_bits_in_any_company(model, dtype):
    options = company(dtype, max_model_len=256, num_blocks=300)
    options[2]["num_blocks"] = 18
    job = {"model": model, "options": options, "lengths": (*LENGTHS, 64, 65, 90), "trials": 4}
    check(run_invariance(job))


def test_eager_pieces_are_refused():
    with pytest.raises(ConfigError, match=r"batch_invariant=true: eager pieces answer"):
        LLM(str(tiny_model("llama")), opt="O0", batch_invariant=True)
