"""Packed layouts: round trips in torch and in C++, for any split of the rows."""

import pytest
import torch

from girih.kernels.base.errors import ConfigError
from girih.kernels.ops import reference
from girih.kernels.ops.packing import packed_shape, unpack_linear

SPLITS = ([37], [1, 36], [5, 16, 16], [17, 3, 17])


def pack(op, weight, split, isa):
    packed = torch.full(
        packed_shape(*weight.shape, weight.dtype, isa), torch.nan, dtype=weight.dtype
    )
    start = 0
    for rows in weight.split(split):
        op(packed, rows, start)
        start += rows.shape[0]
    return packed


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_reference_round_trip(dtype, isa):
    for k in (23, 24):
        weight = torch.randn(37, k).to(dtype)
        for split in SPLITS:
            packed = pack(reference.pack_linear_, weight, split, isa)
            assert torch.equal(unpack_linear(packed, 37, k, isa), weight)


def test_library_packs_as_the_reference_does(built, dtype):
    for k in (23, 24):
        weight = torch.randn(37, k + 3).to(dtype)[:, :k]  # rows are not adjacent in memory
        for split in SPLITS:
            packed = pack(torch.ops.girih.pack_linear_, weight, split, built.isa)
            want = pack(reference.pack_linear_, weight, split, built.isa)
            assert torch.equal(packed.nan_to_num(7), want.nan_to_num(7))


def test_errors_name_value_and_choices(built):
    with pytest.raises(ConfigError, match="no packed layout"):
        packed_shape(8, 8, torch.int8, "avx2")
    with pytest.raises(ConfigError, match="isa is 'mmx'"):
        packed_shape(8, 8, torch.float32, "mmx")
    packed = torch.zeros(packed_shape(16, 8, torch.float32, built.isa))
    with pytest.raises(ConfigError, match="packed weight has shape"):
        unpack_linear(packed, 100, 8, built.isa)
    with pytest.raises(RuntimeError, match="do not fit"):
        torch.ops.girih.pack_linear_(packed, torch.zeros(40, 8), 0)
