"""How layers are sorted into KV groups, what a group keeps, and how much a request needs."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from girih.kernels.kv.groups import (
    FULL,
    KVCacheGroup,
    KVCacheSpec,
    blocks_for,
    longest,
    one_group,
    plan_groups,
)

WINDOW, CHUNK = KVCacheGroup(window=512), KVCacheGroup(chunk=256)


def layers(*windows, **fields):
    """One spec per window; 0 is a full layer."""
    return [KVCacheSpec(2, 64, 64, 2, window=window, **fields) for window in windows]


def kinds(plan):
    return [(len(group.layers), group.window, group.chunk) for group in plan.groups]


@pytest.mark.parametrize(
    ("counts", "sizes", "padding"),
    [
        ((3, 15), [3, 3, 3, 3, 3, 3], 0),
        ((4, 22), [4, 4, 4, 4, 4, 4, 2], 2),
        ((12, 12), [12, 12], 0),
        ((12, 13), [12, 13], 1),
        ((7, 31), [7, 8, 8, 8, 7], 2),
        ((1, 5), [1, 1, 1, 1, 1, 1], 0),
    ],
)
def test_groups_are_equal_and_few(counts, sizes, padding):
    full, sliding = counts
    plan = plan_groups(layers(*[512] * sliding, *[0] * full), 32, 32768)
    assert [len(group.layers) for group in plan.groups] == sizes
    assert plan.num_padding == padding
    assert sorted(n for g in plan.groups for n in g.layers) == list(range(full + sliding))
    assert plan.groups[0].is_full
    token_bytes = 2 * (64 + 64) * 2
    assert plan.block_bytes == 32 * token_bytes * max(sizes)


def test_layers_stay_together_when_apart_saves_nothing():
    specs = layers(512, 512, 0)
    for length in (256, 512, 540):
        assert plan_groups(specs, 32, length).groups == one_group(specs, 32).groups
    assert len(plan_groups(specs, 32, 4096).groups) == 3


def test_one_kind_of_layers_is_one_group():
    assert kinds(plan_groups(layers(*[0] * 5), 32, 4096)) == [(5, 0, 0)]
    assert kinds(plan_groups(layers(*[64] * 5), 32, 4096)) == [(5, 64, 0)]
    assert plan_groups([], 32, 4096).groups == ()


def test_layers_of_unequal_heads_stay_together():
    specs = [*layers(512, 512), KVCacheSpec(1, 128, 128, 2)]
    assert specs[0].token_bytes == specs[2].token_bytes
    assert kinds(plan_groups(specs, 32, 32768)) == [(3, 0, 0)]


def test_bytes_with_scales():
    assert KVCacheSpec(2, 64, 32, 1, scale_bytes=4).token_bytes == 2 * (64 + 32 + 8)


@pytest.mark.parametrize(
    "group", [FULL, KVCacheGroup(window=5), KVCacheGroup(chunk=7), KVCacheGroup(window=5, chunk=7)]
)
def test_what_a_group_keeps_is_what_later_tokens_see(group):
    def sees(query, key):
        return (
            key <= query
            and not (group.window and key <= query - group.window)
            and not (group.chunk and key // group.chunk != query // group.chunk)
        )

    for position in range(40):
        seen = {k for q in range(position, 80) for k in range(position + 1) if sees(q, k)}
        assert group.first_needed(position) == min(seen)
    for position in range(1, 40):
        first = group.unneeded_at(position)
        if group.is_full:
            assert first == sys.maxsize
            continue
        assert group.first_needed(first) >= position
        assert group.first_needed(first - 1) < position


@given(
    window=st.integers(1, 70),
    chunked=st.booleans(),
    lookahead=st.integers(1, 90),
    length=st.integers(1, 300),
)
def test_no_request_holds_more_than_the_most_blocks(window, chunked, lookahead, length):
    group = KVCacheGroup(chunk=window) if chunked else KVCacheGroup(window=window)
    held = [
        -(-min(length, proved + lookahead) // 16) - group.first_needed(proved) // 16
        for proved in range(length)
    ]
    assert max(held) <= blocks_for([group], length, 16, lookahead)


@given(
    groups=st.lists(st.sampled_from([FULL, WINDOW, CHUNK]), min_size=1, max_size=4),
    num_blocks=st.integers(0, 300),
    lookahead=st.integers(0, 300),
)
def test_the_longest_request_that_fits(groups, num_blocks, lookahead):
    tokens = longest(groups, num_blocks, 16, lookahead)
    if tokens == sys.maxsize:
        assert blocks_for(groups, 1 << 40, 16, lookahead) <= num_blocks
        return
    assert tokens % 16 == 0
    assert blocks_for(groups, tokens, 16, lookahead) <= num_blocks
    assert blocks_for(groups, tokens + 1, 16, lookahead) > num_blocks


def test_texts_for_people():
    plan = plan_groups(layers(*[512] * 15, 0, 0, 0), 32, 32768)
    assert plan.as_text() == (
        "kv groups 1 × 3 layers full; 5 × 3 layers window 512\n"
        "kv bytes  9216 per token, 1536 when it is out of every window\n"
    )
    assert plan.as_saving(32768) == (
        "kv saved  82% of a request of 32768 tokens: 52.0 MiB instead of 288.0\n"
    )
    single = one_group(plan.specs, 32)
    assert single.as_text() == (
        "kv groups 1 × 18 layers full, of every kind\nkv bytes  9216 per token\n"
    )
    assert single.as_saving(32768) == ""
    assert plan_groups([], 32, 64).as_text() == "kv groups none\n"
