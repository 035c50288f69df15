"""The C++ ops against the references, and what they promise about batching."""

import pytest
import torch
from support_paged import make_case

from girih.kernels.attention.backends import AttentionSpec
from girih.kernels.kv.layout import kv_cache_shapes, write_tokens
from girih.kernels.ops import reference
from girih.kernels.ops.packing import packed_shape

OPS = torch.ops.girih
TOKENS = (1, 3, 7, 13, 33, 130)
MIXED = [(5, 5), (1, 70), (33, 40), (0, 9), (1, 1), (130, 130), (1, 1100)]


def packed_weight(n, k, dtype, isa):
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    packed = torch.full(packed_shape(n, k, dtype, isa), torch.nan, dtype=dtype)
    OPS.pack_linear_(packed, weight, 0)
    return packed


@pytest.mark.parametrize("n,k", [(37, 23), (192, 64), (40, 2500), (5, 1)])
def test_packed_linear(built, dtype, tolerance, n, k):
    packed, bias = packed_weight(n, k, dtype, built.isa), torch.randn(n).to(dtype)
    x = torch.randn(600, k + 5).to(dtype)[:, :k]  # row stride is not k
    for given in (bias, None):
        want = reference.packed_linear(x, packed, given, n)
        everything = OPS.packed_linear(x, packed, given, n)
        torch.testing.assert_close(everything, want, atol=tolerance, rtol=tolerance)
        for tokens in TOKENS:  # a row's bits do not depend on the rows beside it
            part = OPS.packed_linear(x[:tokens], packed, given, n)
            assert torch.equal(part, everything[:tokens])
    assert OPS.packed_linear(x[:0], packed, bias, n).shape == (0, n)


def test_packed_linear_does_not_depend_on_threads(built):
    packed, x = packed_weight(300, 64, torch.bfloat16, built.isa), torch.randn(200, 64).bfloat16()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(OPS.packed_linear(x, packed, None, 300))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def compare(spec, requests, dtype, tolerance, block_size=16, padding=2, kv_dtype=None):
    case = make_case(spec, requests, dtype, block_size, padding, kv_dtype)
    sinks = torch.randn(spec.num_heads) if spec.has_sinks else None
    shape = (case.q.shape[0], spec.num_heads, spec.head_dim_v)
    out, want = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    keys, values = case.key_cache, case.value_cache
    case.clone_caches()
    reference.paged_attention(*case.arguments(spec, sinks), want)
    written = case.key_cache, case.value_cache
    case.key_cache, case.value_cache = keys, values
    OPS.paged_attention(*case.arguments(spec, sinks), out)
    torch.testing.assert_close(out, want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(keys, written[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, written[1], rtol=0, atol=0, equal_nan=True)
    return case, out


@pytest.mark.parametrize("dims", [(8, 8), (24, 64), (64, 64), (72, 128), (128, 24), (256, 256)])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (8, 2), (20, 1)])
def test_paged_attention(built, dtype, tolerance, heads, dims):
    spec = AttentionSpec(*heads, *dims, dims[0] ** -0.5)
    compare(spec, MIXED, dtype, tolerance)


@pytest.mark.parametrize("block_size", [16, 32, 48, 128])
@pytest.mark.parametrize(
    "kind",
    [
        {"window": 1},
        {"window": 50},
        {"window": 513},
        {"softcap": 3.0},
        {"has_sinks": True},
        {"causal": False},
        {"causal": False, "has_sinks": True, "softcap": 30.0},
        {"window": 33, "softcap": 5.0, "has_sinks": True},
    ],
    ids=str,
)
def test_paged_attention_masks(built, dtype, tolerance, kind, block_size):
    spec = AttentionSpec(6, 2, 40, 40, 0.2, **kind)
    compare(spec, MIXED, dtype, tolerance, block_size)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("heads", [(4, 4), (9, 3), (20, 1)])
@pytest.mark.parametrize("dims", [(8, 8), (64, 64), (72, 128), (128, 24)])
def test_int8_cache(built, dtype, tolerance, heads, dims, block_size):
    spec = AttentionSpec(*heads, *dims, dims[0] ** -0.5)
    case, out = compare(spec, MIXED, dtype, tolerance, block_size, kv_dtype=torch.int8)
    # What was rounded changes the result a little: one step is 1/127 of a token's largest element.
    exact = torch.empty_like(out)
    shapes = kv_cache_shapes(case.key_cache.shape[0], block_size, heads[1], *dims, dtype)
    caches = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        places = torch.arange(len(keys))
        blocks = case.block_table[row][places // block_size].long()
        write_tokens(*caches, keys, values, blocks * block_size + places % block_size)
    case.key_cache, case.value_cache = caches
    reference.paged_attention(*case.arguments(spec), exact)
    error = (out - exact).float().square().mean().sqrt() / exact.float().square().mean().sqrt()
    assert 0 < error < 0.02


@pytest.mark.parametrize(
    "kind",
    [{"window": 50}, {"has_sinks": True, "softcap": 5.0}, {"causal": False}],
    ids=str,
)
def test_int8_cache_masks(built, dtype, tolerance, kind):
    spec = AttentionSpec(6, 2, 40, 40, 0.2, **kind)
    compare(spec, MIXED, dtype, tolerance, 32, kv_dtype=torch.int8)


def test_int8_cache_of_zeros_and_of_one_large_element(built):
    spec = AttentionSpec(2, 1, 16, 16, 0.25)
    case = make_case(spec, [(3, 3)], torch.float32, kv_dtype=torch.int8)
    case.k[:], case.v[:] = 0, 0
    case.v[2, 0, 5] = 1e30
    out = torch.empty(3, 2, 16)
    OPS.paged_attention(*case.arguments(spec), out)
    assert torch.equal(out[:2], torch.zeros(2, 2, 16))
    torch.testing.assert_close(out[2, :, 5], torch.full((2,), 1e30 / 3))
    assert out[2].count_nonzero() == 2


def test_largest_head_size(built, dtype, tolerance):
    compare(AttentionSpec(2, 1, 512, 512, 512**-0.5), [(9, 100), (1, 30)], dtype, tolerance)


def test_window_reads_no_freed_block(built):
    """Blocks that left the window may belong to the null block, whose content is NaN here."""
    spec = AttentionSpec(4, 2, 16, 16, 0.25, window=20)
    torch.manual_seed(0)
    case = make_case(spec, [(1, 100), (3, 90)], torch.float32)
    full = torch.empty(4, 4, 16)
    OPS.paged_attention(*case.arguments(spec), full)
    case.block_table[:, :4] = 0
    case.key_cache[0], case.value_cache[0] = torch.nan, torch.nan
    freed = torch.empty(4, 4, 16)
    OPS.paged_attention(*case.arguments(spec), freed)
    assert torch.equal(full, freed) and not full.isnan().any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_chunks_and_batching_do_not_change_a_bit(built, dtype, kv_dtype):
    """One request in one go, in chunks, beside others, with 1 or 3 threads: equal bits."""
    spec = AttentionSpec(6, 2, 64, 64, 0.125, window=700)
    length = 1200
    case = make_case(spec, [(length, length)], dtype, kv_dtype=kv_dtype)
    whole = torch.empty(length, 6, 64, dtype=dtype)
    OPS.paged_attention(*case.arguments(spec), whole)
    threads = torch.get_num_threads()
    for count, chunks in ((1, [1000, 1, 1, 198]), (3, [64, 500, 635, 1])):
        begin, parts = 0, []
        torch.set_num_threads(count)
        try:
            for chunk in chunks:
                end = begin + chunk
                out = torch.empty(chunk, 6, 64, dtype=dtype)
                OPS.paged_attention(
                    *(case.q[begin:end], case.k[begin:end], case.v[begin:end]),
                    *(case.key_cache, case.value_cache),
                    torch.tensor([0, chunk], dtype=torch.int32),
                    torch.tensor([end], dtype=torch.int32),
                    *(case.block_table, case.slot_mapping[begin:end]),
                    *(spec.scale, True, spec.window, 0.0, None, out),
                )
                parts.append(out)
                begin = end
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(torch.cat(parts), whole)


def test_packed_linear_reads_rows_of_any_layout(built):
    """A convolution's result is [K, T] in memory, and Inductor may leave any result so."""
    packed = packed_weight(16, 8, torch.float32, built.isa)
    x = torch.randn(8, 4).t()
    want = OPS.packed_linear(x.contiguous(), packed, None, 16)
    assert torch.equal(OPS.packed_linear(x, packed, None, 16), want)
    assert torch.equal(
        OPS.packed_linear(torch.randn(4, 88)[:, ::11].copy_(x), packed, None, 16), want
    )
    row = torch.randn(8, 1).t()
    assert OPS.packed_linear(row, packed, None, 16).shape == (1, 16)


def test_strides_that_attention_cannot_read_are_refused(built):
    spec = AttentionSpec(2, 2, 8, 8, 1.0)
    case = make_case(spec, [(3, 3)], torch.float32)
    case.q = torch.randn(3, 8, 2).transpose(1, 2)
    with pytest.raises(RuntimeError, match="q: elements"):
        OPS.paged_attention(*case.arguments(spec), torch.empty(3, 2, 8))


@pytest.mark.parametrize(
    "name,value,message",
    [
        ("seq_lens", torch.tensor([2], dtype=torch.int32), "new tokens in a context"),
        ("seq_lens", torch.tensor([99], dtype=torch.int32), "needs 7 blocks"),
        ("block_table", torch.tensor([[77]], dtype=torch.int32), "names block 77"),
        ("slot_mapping", torch.tensor([1, 2, 99999]), "has slot 99999"),
        ("slot_mapping", torch.tensor([1, 2, 3], dtype=torch.int32), "unexpected dtype"),
        ("k", torch.zeros(3, 2, 16), "k has shape"),
    ],
)
def test_a_batch_that_leaves_its_tensors_is_refused(built, name, value, message):
    spec = AttentionSpec(2, 2, 8, 8, 1.0)
    case = make_case(spec, [(3, 3)], torch.float32)
    setattr(case, name, value)
    with pytest.raises(RuntimeError, match=message):
        OPS.paged_attention(*case.arguments(spec), torch.empty(3, 2, 8))


def test_ops_trace_with_symbolic_tokens(built):
    packed = packed_weight(32, 8, torch.float32, built.isa)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def twice(x):
        return OPS.packed_linear(x * 2, packed, None, 32) + 1

    for tokens in (3, 5):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(twice(x), OPS.packed_linear(x * 2, packed, None, 32) + 1)
