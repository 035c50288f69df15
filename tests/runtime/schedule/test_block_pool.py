"""The block pool against a naive model of it, and the order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from girih.kernels.base.errors import CapacityError, EngineError
from girih.runtime.schedule.block_pool import ROOT_HASH, BlockPool, hash_block, hash_chain


def ids(blocks):
    return [block.block_id for block in blocks]


def cached_table(pool, num_blocks, label):
    """Allocate a table and cache all of it; returns its blocks."""
    table = pool.allocate(num_blocks)
    for index, block in enumerate(table):
        pool.cache([block], [hash_block(ROOT_HASH, [label, index])])
    return table


def test_hash_depends_on_parent_tokens_and_extra_keys_only():
    base = hash_block(ROOT_HASH, [1, 2, 3])
    assert base == hash_block(ROOT_HASH, (1, 2, 3))
    assert len(base) == 32
    variants = [
        hash_block(base, [1, 2, 3]),
        hash_block(ROOT_HASH, [1, 2, 4]),
        hash_block(ROOT_HASH, [1, 2]),
        hash_block(ROOT_HASH, [1, 2, 3], ("salt",)),
        hash_block(ROOT_HASH, [1, 2, 3], ("s", "alt")),
    ]
    assert len({base, *variants}) == 6


def test_hash_is_the_same_in_every_process():
    expected = "297fe18f3d108dc8"
    assert hash_block(ROOT_HASH, [1, 2, 3], ("salt",)).hex()[:16] == expected


def test_a_chain_is_the_hashes_of_its_blocks():
    tokens = [3, -1, 2**40, 7, 8, 9]
    parent, expected = hash_block(ROOT_HASH, [1, 2]), []
    for start in range(0, 6, 2):
        expected.append(hash_block(expected[-1] if expected else parent, tokens[start : start + 2]))
    assert hash_chain(parent, tokens, 2) == expected
    assert hash_chain(parent, [], 2) == []


def test_blocks_are_found_up_to_the_first_that_is_missing():
    pool = BlockPool(9)
    blocks = pool.allocate(3)
    keys = [b"a", b"b", b"c"]
    pool.cache([blocks[0], blocks[2]], [keys[0], keys[2]])
    assert pool.find_leading(keys) == blocks[:1]
    assert pool.find_leading(keys[2:]) == blocks[2:]


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(ids(pool.allocate(4))) == [1, 2, 3, 4]
    with pytest.raises(CapacityError, match="1 KV blocks asked, 0 are free"):
        pool.allocate(1)


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    with pytest.raises(CapacityError):
        pool.allocate(4)
    assert pool.num_free == 3


def test_unhashed_blocks_are_reused_last_freed_first():
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(first)
    pool.release(second)
    assert ids(pool.allocate(4)) == ids(second) + ids(first)


def test_hashed_blocks_are_evicted_least_recently_used_first_and_tail_before_head():
    pool = BlockPool(7)
    old, recent = cached_table(pool, 3, 1), cached_table(pool, 3, 2)
    pool.release(old)
    pool.release(recent)
    pool.add_references(old)  # a hit makes it the more recent one
    pool.release(old)
    assert ids(pool.allocate(6)) == ids(recent[::-1]) + ids(old[::-1])
    assert pool.num_evictions == 6
    assert pool.num_cached == 0


def test_unhashed_blocks_go_before_cached_ones():
    pool = BlockPool(6)
    cached, plain = cached_table(pool, 2, 1), pool.allocate(3)
    pool.release(plain)
    pool.release(cached)
    assert set(ids(pool.allocate(3))) == set(ids(plain))
    assert pool.num_evictions == 0


def test_a_block_with_references_is_never_evicted():
    pool = BlockPool(4)
    shared = cached_table(pool, 2, 1)
    pool.add_references(shared)
    pool.release(shared)
    assert pool.num_free == 1
    with pytest.raises(CapacityError):
        pool.allocate(2)


def test_equal_content_is_cached_once():
    pool = BlockPool(4)
    first, twin = pool.allocate(2)
    key = hash_block(ROOT_HASH, [5])
    pool.cache([first], [key])
    pool.cache([twin], [key])
    assert pool.find(key) is first
    assert twin.block_hash is None


def test_forgetting_keeps_references():
    pool = BlockPool(5)
    used, free = cached_table(pool, 2, 1), cached_table(pool, 2, 2)
    pool.release(free)
    pool.forget_cached()
    pool.check_integrity([used])
    assert pool.num_cached == 0
    assert pool.num_free == 2


def test_integrity_check_sees_a_leak_a_double_free_and_a_wrong_hash():
    pool = BlockPool(4)
    table = pool.allocate(2)
    with pytest.raises(EngineError, match="is in 0 block tables"):
        pool.check_integrity([])
    pool.release(table)
    with pytest.raises(EngineError, match="released more often"):
        pool.release(table[:1])
    pool = BlockPool(4)
    table = pool.allocate(1)
    table[0].block_hash = b"x"
    with pytest.raises(EngineError, match="does not know"):
        pool.check_integrity([table])


def test_a_free_block_cannot_enter_the_cache():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(EngineError, match="is free"):
        pool.cache([block], [b"h"])


class PoolMachine(RuleBasedStateMachine):
    """The pool next to a model made of a plain list (eviction order) and dictionaries."""

    NUM_BLOCKS = 9

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(self.NUM_BLOCKS)
        self.tables = []
        self.order = list(range(1, self.NUM_BLOCKS))  # free ids, next to be handed out first
        self.hash_of = {}
        self.references = dict.fromkeys(range(1, self.NUM_BLOCKS), 0)
        self.evictions = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count):
        if count > len(self.order):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return
        expected, self.order = self.order[:count], self.order[count:]
        for block_id in expected:
            self.evictions += self.hash_of.pop(block_id, None) is not None
            self.references[block_id] = 1
        table = self.pool.allocate(count)
        assert ids(table) == expected
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), label=st.integers(0, 6))
    def cache(self, data, label):
        block = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        key = hash_block(ROOT_HASH, [label])
        if block.block_id not in self.hash_of and key not in self.hash_of.values():
            self.hash_of[block.block_id] = key
        self.pool.cache([block], [key])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block_id in reversed(ids(table)):
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                at = len(self.order) if block_id in self.hash_of else 0
                self.order.insert(at, block_id)
        self.pool.release(table)

    @rule(labels=st.lists(st.integers(0, 6), unique=True, max_size=3))
    def hit(self, labels):
        found = [self.pool.find(hash_block(ROOT_HASH, [label])) for label in labels]
        found = [block for block in found if block is not None]
        for block in found:
            if block.block_id in self.order:
                self.order.remove(block.block_id)
            self.references[block.block_id] += 1
        self.pool.add_references(found)
        self.tables.append(found)

    @rule()
    def forget(self):
        self.hash_of.clear()
        self.pool.forget_cached()

    @invariant()
    def agrees(self):
        self.pool.check_integrity(self.tables)
        assert self.pool.num_free == len(self.order)
        assert self.pool.num_evictions == self.evictions
        assert self.pool.num_cached == len(self.hash_of)
        for block_id, key in self.hash_of.items():
            assert self.pool.find(key).block_id == block_id
        for block_id, count in self.references.items():
            assert self.pool.blocks[block_id].ref_count == count


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
