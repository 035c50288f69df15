"""Every family of transformers: compiled programs against its eager float32 models.

The fast subset runs with the suite. `make archs` runs all of them and writes the table
(`graph/ARCHITECTURES.md`); with ARCHS_COMPILE=1 tiles are compiled instead of run eagerly.
"""

import os
from pathlib import Path

import pytest
from support_agreement import check_family, compiled_tiles, eager_tiles
from support_architectures import REFUSED, families
from support_table import write_table

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
    "bert": "encoder",
}
COMPILE = bool(os.environ.get("ARCHS_COMPILE"))
ALL = {family.name: family for family in families()}


@pytest.mark.parametrize("name", FAST)
def test_fast_subset_agrees(name, tmp_path):
    row = check_family(ALL[name], tmp_path)
    assert row.agrees, row


@pytest.fixture(scope="module")
def rows():
    found = []
    yield found
    target = os.environ.get("ARCHS_TABLE")
    if target:
        write_table(found, Path(target), COMPILE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_family_agrees_or_is_refused(name, tmp_path, rows):
    if name in REFUSED and REFUSED[name].startswith("not built"):
        pytest.skip(REFUSED[name])
    make_tiles = compiled_tiles(tmp_path / "tiles") if COMPILE else eager_tiles
    row = check_family(ALL[name], tmp_path / "model", make_tiles)
    rows.append(row)
    if name in REFUSED:
        assert row.result.startswith("refused: "), row
        assert REFUSED[name] in row.result
    else:
        assert row.agrees, row


def test_refused_families_are_in_the_table():
    assert set(REFUSED) <= set(ALL)
