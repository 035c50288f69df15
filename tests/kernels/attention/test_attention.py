"""Backends: capabilities, choice, plan and run."""

from dataclasses import replace

import pytest
import torch
from support_paged import make_case

from girih.kernels.attention.backends import (
    BACKENDS,
    AttentionSpec,
    choose_backend,
    kv_cache_shapes,
)
from girih.kernels.base.errors import ConfigError
from girih.kernels.build import library

SPEC = AttentionSpec(6, 2, 16, 24, 0.25)


def test_choice_prefers_the_library_and_keeps_reasons(built, monkeypatch):
    choice = choose_backend(SPEC, torch.bfloat16, 32)
    assert choice.backend.name == "cpu_paged" and choice.reasons == ()
    monkeypatch.setattr(library, "_loaded", None)
    choice = choose_backend(SPEC, torch.bfloat16, 32)
    assert choice.backend.name == "reference"
    assert choice.reasons == (("cpu_paged", "the CPU kernel library is not loaded"),)
    with pytest.raises(ConfigError, match="not loaded"):
        choose_backend(SPEC, torch.bfloat16, 32, only="cpu_paged")


@pytest.mark.parametrize(
    "change,block_size,reason",
    [
        ({"head_dim": 20}, 32, "head_dim 20"),
        ({"head_dim_v": 520}, 32, "head_dim_v 520"),
        ({"num_kv_heads": 4}, 32, "6 heads"),
        ({}, 24, "block_size 24"),
    ],
)
def test_reasons_against_a_layer(built, change, block_size, reason):
    for backend in BACKENDS:
        said = backend.why_not(replace(SPEC, **change), torch.float32, block_size)
        assert said is not None and reason in said
    with pytest.raises(ConfigError, match=reason):
        choose_backend(replace(SPEC, **change), torch.float32, block_size)


def test_unknown_backend_is_an_error():
    with pytest.raises(ConfigError, match=r"'flash'.*cpu_paged, reference"):
        choose_backend(SPEC, torch.float32, 16, only="flash")
    assert BACKENDS[0].why_not(SPEC, torch.float64, 16) is not None
    assert "not a floating-point" in str(BACKENDS[1].why_not(SPEC, torch.int32, 16))


def test_backends_agree(built, dtype, tolerance):
    case = make_case(SPEC, [(7, 20), (1, 33)], dtype, padding=1)
    outs = []
    for backend in BACKENDS:
        out = torch.full((9, 6, 24), torch.nan, dtype=dtype)
        backend.run(
            case.q, case.k, case.v, case.key_cache, case.value_cache, case.metadata, 0, SPEC, out
        )
        outs.append(out)
    torch.testing.assert_close(outs[0], outs[1], atol=tolerance, rtol=tolerance)


def test_metadata_is_checked_when_made():
    good = make_case(SPEC, [(7, 20)], torch.float32).metadata
    for name, value, reason in (
        ("seq_lens", good.seq_lens.long(), "seq_lens is torch.int64"),
        ("slot_mappings", (good.slot_mappings[0].int(),), "slot_mappings is torch.int32"),
        ("block_tables", (good.block_tables[0].repeat(3, 3).t(),), "block_tables .* adjacent"),
        ("block_tables", (good.block_tables[0].repeat(3, 1),), r"block tables of \[3\] rows"),
        ("query_start", torch.zeros(5, dtype=torch.int32), "5 query starts .need 2"),
    ):
        with pytest.raises(ConfigError, match=f"attention metadata: .*{reason}"):
            replace(good, **{name: value})


def test_cache_shapes_hold_the_same_elements(dtype):
    for shape, dim in zip(kv_cache_shapes(3, 32, 2, 16, 24, dtype), (16, 24), strict=True):
        assert torch.Size(shape).numel() == 3 * 32 * 2 * dim and shape[:2] == (3, 2)
    with pytest.raises(ConfigError, match="block_size is 24"):
        kv_cache_shapes(3, 24, 2, 16, 16, dtype)
    with pytest.raises(ConfigError, match="head_dim_v is 12"):
        kv_cache_shapes(3, 32, 2, 16, 12, dtype)


def test_an_int8_cache_has_backends_and_others_have_reasons():
    for kv_dtype in (torch.int8, torch.float32, None):
        assert choose_backend(SPEC, torch.float32, 16, kv_dtype=kv_dtype).backend.name
    with pytest.raises(ConfigError, match=r"float8_e4m3fn is neither that of torch.float32 nor"):
        choose_backend(SPEC, torch.float32, 16, kv_dtype=torch.float8_e4m3fn)
