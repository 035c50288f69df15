"""Every family of transformers: girih's programs against its eager float32 models.

The fast subset runs with the suite. `make archs` runs all of them and writes what it finds into the
table (`graph/ARCHITECTURES.md`), each row as soon as it is there. With ARCHS_COMPILE=1 tiles are
compiled instead of run eagerly: hours for all families, so packages and results are kept in
ARCHS_CACHE, and a run goes on where the one before it ended.
"""

import os
import time
from pathlib import Path

import pytest
from support_architectures import REFUSED, families
from support_families import SharedTiles, check_family, eager_tiles
from support_library import build_cached
from support_table import Results, update_table

from girih.kernels.base.target import detect_isa
from girih.kernels.build.library import load_library

FAST = {
    "llama": "dense",
    "mistral": "sliding window",
    "gemma2": "soft cap, alternating windows",
    "gpt_oss": "sinks, mixture of experts",
    "qwen3_moe": "mixture of experts",
    "deepseek_v3": "latent attention",
    "cohere": "parallel block, logit scale",
    "bamba": "Mamba-2 hybrid",
    "qwen3_next": "gated delta net",
    "lfm2": "short convolutions, whose results are not dense rows",
    "llama4_text": "mixture of experts that transformers runs in full",
    "bert": "encoder",
}
COMPILE = bool(os.environ.get("ARCHS_COMPILE"))
TABLE = os.environ.get("ARCHS_TABLE")
# Seconds after which no further family is started; 0: no limit.
SECONDS = float(os.environ.get("ARCHS_SECONDS", "0"))
STARTED = time.monotonic()
ALL = {family.name: family for family in families()}


@pytest.mark.parametrize("name", FAST)
def test_fast_subset_is_verified(name, tmp_path):
    load_library(build_cached(detect_isa(), detect_isa()))
    row = check_family(ALL[name], tmp_path)
    assert row.passed, row


@pytest.fixture(scope="module")
def make_tiles():
    if not COMPILE:
        yield eager_tiles
        return
    tiles = SharedTiles(Results.directory() / "tiles")
    yield tiles
    tiles.close()


@pytest.fixture(scope="module")
def results():
    return Results(COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_family_is_verified_or_refused(name, tmp_path, make_tiles, results):
    if name in REFUSED and REFUSED[name].startswith("not built"):
        pytest.skip(REFUSED[name])
    if SECONDS and time.monotonic() - STARTED > SECONDS:
        pytest.skip(f"left for the next run (ARCHS_SECONDS={SECONDS:g})")
    row = results.find(name)
    if row is None:
        row = check_family(ALL[name], tmp_path, make_tiles)
        results.add(row)
    if TABLE:
        update_table(row, Path(TABLE), COMPILE)
    if name in REFUSED:
        assert row.result.startswith("refused: "), row
        assert REFUSED[name] in row.result
    else:
        assert row.passed, row


def test_refused_families_are_in_the_table():
    assert set(REFUSED) <= set(ALL)
