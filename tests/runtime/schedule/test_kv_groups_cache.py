"""KV groups in the block tables: what is given back when, and the longest common prefix hit."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_core import make_core, make_request, run_to_end
from support_fake_runner import fake_generate

from girih.kernels.base.errors import EngineError, RequestError
from girih.kernels.kv.groups import FULL, KVCacheGroup
from girih.runtime.records.request import Request
from girih.runtime.schedule.kv_cache import KVCacheManager, PrefixHit

SLIDING, CHUNKED = KVCacheGroup(window=40), KVCacheGroup(chunk=64)
GEMMA = (FULL, SLIDING, SLIDING)
SIZE = 16


def group_of(core, request_id, number):
    request, groups = core.scheduler.requests[request_id], core.scheduler.kv_cache.num_groups
    return [block.block_id for block in request.blocks[number::groups]]


def finish(core, request):
    core.add_request(request)
    return run_to_end(core)[request.request_id]


def is_right(entry, request):
    """Whether the tokens collected (maybe not from the start on) are those of the request alone."""
    expected = fake_generate(request, 1000, 256)
    return entry.tokens and entry.tokens == expected[-len(entry.tokens) :]


@pytest.mark.parametrize("caching", [True, False])
def test_blocks_that_left_the_window_are_given_back_while_a_prompt_is_computed(new_core, caching):
    core = new_core(
        groups=GEMMA, num_blocks=200, max_num_batched_tokens=32, enable_prefix_caching=caching
    )
    core.add_request(make_request("a", 128, max_tokens=30, ignore_eos=True))
    for end, first in ((32, 0), (64, 1), (96, 3), (128, 5)):
        core.step()
        assert first == max(0, end - 40 + 1) // SIZE
        for number in (1, 2):
            table = group_of(core, "a", number)
            assert table[:first] == [0] * first
            assert 0 not in table[first:]
        assert 0 not in group_of(core, "a", 0)
    pool = core.scheduler.kv_cache.pool
    assert pool.num_usable - pool.num_free == 8 + 2 * 3
    run_to_end(core)


def test_chunks_are_given_back_as_a_whole(new_core):
    core = new_core(groups=(FULL, CHUNKED), num_blocks=200, max_num_batched_tokens=48)
    core.add_request(make_request("a", 144, max_tokens=60, ignore_eos=True))
    for first in (0, 4, 8):  # 48, 96 and 144 tokens computed
        core.step()
        table = group_of(core, "a", 1)
        assert [i for i, block in enumerate(table) if block] == list(range(first, len(table)))
    run_to_end(core)


def test_results_in_flight_keep_what_they_read(new_core):
    """Blocks go when a result proves the tokens after them, not when the plan is made."""
    core = new_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    core.add_request(make_request("a", 192, max_tokens=2))
    plans = [core.scheduler.schedule(), core.scheduler.schedule()]
    assert 0 not in group_of(core, "a", 1)
    core.scheduler.update(core.runner.execute(plans[0]))
    assert group_of(core, "a", 1)[:2] == [0, group_of(core, "a", 1)[1]]
    core.scheduler.roll_back(plans[1].step_id)
    core.scheduler.preempt_requests(["a"])
    assert is_right(run_to_end(core)["a"], make_request("a", 192, max_tokens=2))


def test_a_hit_needs_only_what_the_window_sees(new_core):
    core = new_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    prefix = list(range(500, 628))  # eight blocks
    finish(core, make_request("a", [*prefix, 1]))
    request = make_request("b", [*prefix, 2], max_tokens=3)
    core.add_request(request)
    core.step()
    (new,) = core.runner.plans[-1].new_requests
    assert new.num_computed_tokens == 128
    assert [new.block_ids[i] for i in range(1, 24, 3)][:5] == [0] * 5
    done = run_to_end(core)["b"]
    assert done.outputs[0].num_cached_tokens == 128
    assert is_right(done, request)


def test_what_a_hit_spares_is_only_what_it_holds(new_core):
    core = new_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    prefix = list(range(500, 628))
    finish(core, make_request("a", [*prefix, 1]))
    cache = core.scheduler.kv_cache
    request = Request(make_request("b", [*prefix, *range(72)]), 0, 256)
    hit = cache.get_computed_blocks(request)
    # 200 tokens: 13 rows of the full group, rows 5 to 12 of the others; 8 + 2 × 3 are in the hit
    needed = 13 + 2 * 8 - (8 + 2 * 3)
    free = cache.pool.num_free - 14
    assert cache.can_admit(request, hit, free - needed)
    assert not cache.can_admit(request, hit, free - needed + 1)


def test_a_hit_ends_where_a_window_has_a_gap(new_core):
    core = new_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    prefix = list(range(500, 628))
    finish(core, make_request("a", [*prefix, 1]))
    cache = core.scheduler.kv_cache
    block_hash = cache._block_hash(Request(make_request("x", [*prefix, 1]), 0, 200), 6)
    block = cache.pool._cached.pop(block_hash + b"\x00\x02")
    block.block_hash = None
    cache.pool._free.remove(block)
    cache.pool._free.push_front(block)
    request = make_request("b", [*prefix, 2], max_tokens=3)
    done = finish(core, request)
    # row 6 is gone in one sliding group; up to row 6 the window of 40 sees rows 3, 4 and 5
    assert done.outputs[0].num_cached_tokens == 96
    assert is_right(done, request)


def test_a_preempted_request_comes_back_with_its_window(new_core):
    core = new_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    request = make_request("a", 150, max_tokens=20, ignore_eos=True)
    core.add_request(request)
    for _ in range(6):
        core.step()
    core.scheduler.preempt_requests(["a"])
    pool = core.scheduler.kv_cache.pool
    assert pool.num_free == pool.num_usable
    core.step()
    (new,) = core.runner.plans[-1].new_requests
    assert new.num_computed_tokens == 144
    assert is_right(run_to_end(core)["a"], request)


def test_more_requests_run_than_blocks_of_one_kind_would_let(new_core):
    core = new_core(groups=GEMMA, num_blocks=1 + 70, max_num_batched_tokens=32, plans_in_flight=1)
    for name in "abc":  # 13 rows each: 39 × 3 blocks if nothing were given back
        core.add_request(make_request(name, 192, max_tokens=16, ignore_eos=True))
    most = 0
    while core.has_work():
        core.step()
        core.check_integrity()
        most = max(most, len(core.scheduler.running))
    assert most == 3
    assert core.stats().num_preemptions == 0


def test_capacity_is_that_of_the_groups(new_core):
    # one row of lookahead beside the window: 40 - 1 + 16 tokens lie in at most 5 blocks
    core = new_core(groups=GEMMA, num_blocks=1 + 16, max_num_batched_tokens=16, plans_in_flight=1)
    assert core.scheduler.kv_cache.capacity_tokens == 6 * SIZE
    with pytest.raises(RequestError, match=r"the KV cache allows 97"):
        core.add_request(make_request("a", 97))
    request = make_request("b", 90, max_tokens=7, ignore_eos=True)
    assert is_right(finish(core, request), request)
    assert core.stats().num_preemptions == 0


def test_a_model_without_attention_needs_no_blocks(new_core):
    core = new_core(groups=(), num_blocks=2)
    core.add_request(make_request("a", 200, max_tokens=5, ignore_eos=True))
    plan = core.scheduler.schedule()
    assert plan.new_requests[0].block_ids == []
    core.check_integrity()
    core.abort(["a"])


def test_integrity_notices_a_block_that_was_kept_or_lost():
    core = make_core(groups=GEMMA, num_blocks=200, max_num_batched_tokens=64)
    core.add_request(make_request("a", 128, max_tokens=4))
    core.step()
    core.step()
    request = core.scheduler.requests["a"]
    request.num_released_rows[0] -= 1
    with pytest.raises(EngineError, match=r"in row .* of group 1 .window 40., which gave back"):
        core.check_integrity()


@settings(deadline=None, max_examples=300)
@given(
    groups=st.sampled_from(
        [
            (FULL,),
            (FULL, SLIDING),
            (SLIDING,),
            (FULL, KVCacheGroup(window=3), SLIDING, SLIDING),
            (FULL, CHUNKED),
            (FULL, FULL, KVCacheGroup(window=17), CHUNKED),
        ]
    ),
    length=st.integers(1, 160),
    missing=st.sets(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=6),
)
# The long window takes rows away that the short one had agreed to: it must be asked again.
@example((FULL, KVCacheGroup(window=3), SLIDING, SLIDING), 160, {(6, 1), (7, 2)})
def test_the_longest_common_hit(groups, length, missing):
    """Against trying every length, whatever blocks are missing."""
    manager = KVCacheManager(200, SIZE, groups=groups)
    request = Request(make_request("a", length), 0, 200)
    cached = {}
    for row in range(length // SIZE):
        for group in range(len(groups)):
            if (row, group) not in missing:
                (block,) = manager.pool.allocate(1)
                manager.pool.cache([block], [manager._block_hash(request, row) + suffix(group)])
                cached[row, group] = block

    def fits(rows):
        return all(
            (row, number) in cached
            for number, group in enumerate(groups)
            for row in range(group.first_needed(rows * SIZE) // SIZE, rows)
        )

    expected = max(rows for rows in range((length - 1) // SIZE + 1) if fits(rows))
    hit = manager.get_computed_blocks(request)
    assert hit.num_tokens == expected * SIZE
    assert len(hit.blocks) == expected * len(groups)
    for number, group in enumerate(groups):
        first = group.first_needed(expected * SIZE) // SIZE
        for row, block in enumerate(hit.blocks[number :: len(groups)]):
            null = manager.pool.null_block
            assert block is (cached[row, number] if row >= first else null)
    assert isinstance(hit, PrefixHit)


def suffix(group):
    return group.to_bytes(2) if group else b""
