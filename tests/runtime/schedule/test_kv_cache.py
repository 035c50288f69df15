"""When prefixes are found, when blocks enter the prefix cache, and the counters."""

from __future__ import annotations

from support_core import make_request, run_to_end
from support_fake_runner import FakeRunner, fake_generate

PREFIX = list(range(100, 148))  # three blocks of 16


def first_plan(core):
    core.step()
    return core.runner.plans[-1].new_requests


def run_one(core, request):
    core.add_request(request)
    return run_to_end(core)[request.request_id]


def test_longest_cached_prefix_is_reused_and_reported(new_core):
    core = new_core()
    run_one(core, make_request("a", [*PREFIX, 1, 2]))
    done = run_one(core, make_request("b", [*PREFIX, 3]))
    assert done.outputs[0].num_cached_tokens == 48
    assert done.tokens == fake_generate(make_request("b", [*PREFIX, 3]), 1000, 256)
    done = run_one(core, make_request("c", [*PREFIX[:40], 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]))
    assert done.outputs[0].num_cached_tokens == 32


def test_an_equal_block_after_another_prefix_is_not_a_hit(new_core):
    core = new_core()
    first, other, second = PREFIX[:16], [7] * 16, PREFIX[16:32]
    run_one(core, make_request("a", [*first, *second, 1]))
    run_one(core, make_request("b", [*other, 1]))
    request = make_request("c", [*other, *second, 1])
    done = run_one(core, request)
    assert done.outputs[0].num_cached_tokens == 16
    assert done.tokens == fake_generate(request, 1000, 256)


def test_a_fully_cached_prompt_still_computes_its_last_token(new_core):
    core = new_core()
    first = run_one(core, make_request("a", PREFIX))
    core.add_request(make_request("b", PREFIX))
    (new,) = first_plan(core)
    assert new.num_computed_tokens == 32  # the block of the last token is computed again
    assert run_to_end(core)["b"].tokens == first.tokens[1:]


def test_output_tokens_are_cached_for_the_next_turn(new_core):
    core = new_core()
    done = run_one(core, make_request("a", PREFIX, max_tokens=20, ignore_eos=True))
    turn = [*PREFIX, *done.tokens, 5]
    # the last sampled token was never computed, so 67 of 68 tokens are: four full blocks
    assert run_one(core, make_request("b", turn)).outputs[0].num_cached_tokens == 64


def test_tokens_of_a_plan_without_result_are_not_cached(new_core):
    core = new_core()
    core.add_request(make_request("a", [*PREFIX, 1]))
    plan = core.scheduler.schedule()
    pool = core.scheduler.kv_cache.pool
    assert pool.num_cached == 0
    core.abort(["a"])
    assert core.scheduler.update(core.runner.execute(plan)) == []  # late result
    assert pool.num_cached == 0
    assert pool.num_free == pool.num_usable


def test_salt_separates_prefixes(new_core):
    core = new_core()
    run_one(core, make_request("a", [*PREFIX, 1], cache_salt="x"))
    for name, salt, expected in (("b", None, 0), ("c", "y", 0), ("d", "x", 48)):
        done = run_one(core, make_request(name, [*PREFIX, 1], cache_salt=salt))
        assert done.outputs[0].num_cached_tokens == expected


def test_prompt_logprobs_compute_the_whole_prompt(new_core):
    core = new_core()
    run_one(core, make_request("a", PREFIX))
    done = run_one(core, make_request("b", PREFIX, prompt_logprobs=0))
    assert done.outputs[0].num_cached_tokens == 0
    reported = done.outputs[0].prompt_logprobs
    assert reported[0] is None
    assert [entry.token_id for entry in reported[1:]] == PREFIX[1:]


def test_switched_off_nothing_is_found(new_core):
    core = new_core(enable_prefix_caching=False)
    for name in "ab":
        assert run_one(core, make_request(name, PREFIX)).outputs[0].num_cached_tokens == 0
    assert core.stats().kv_cache.prefix_hits == 0


def test_reset_forgets_what_is_stored_and_what_is_being_computed(new_core):
    core = new_core(max_num_batched_tokens=32)
    run_one(core, make_request("a", [*PREFIX, 1]))
    core.add_request(make_request("b", [500, *PREFIX]))
    core.step()  # 32 of 49 tokens
    core.reset_prefix_cache()
    run_to_end(core)
    assert core.scheduler.kv_cache.pool.num_cached == 0
    for name, prompt in (("c", [*PREFIX, 1]), ("d", [500, *PREFIX])):
        assert run_one(core, make_request(name, prompt)).outputs[0].num_cached_tokens == 0


def test_a_preempted_request_finds_its_own_blocks_again(new_core):
    core = new_core(num_blocks=64)
    core.add_request(make_request("a", [*PREFIX, 1], max_tokens=4))
    core.step()
    core.scheduler.preempt_requests(["a"])
    core.step()
    (new,) = core.runner.plans[-1].new_requests
    assert new.num_computed_tokens == 48
    assert len(new.token_ids) == 50
    run_to_end(core)


def test_a_prefix_in_use_is_shared_not_copied(new_core):
    core = new_core(num_blocks=9)  # 8 usable: 4 + 4 would fill it, sharing leaves room
    core.add_request(make_request("a", [*PREFIX, 1], max_tokens=12, ignore_eos=True))
    core.step()
    core.add_request(make_request("b", [*PREFIX, 2], max_tokens=12, ignore_eos=True))
    core.step()
    assert core.scheduler.kv_cache.pool.num_free == 3
    tables = [[b.block_id for b in r.blocks] for r in core.scheduler.running]
    assert tables[0][:3] == tables[1][:3]
    assert tables[0][3] != tables[1][3]
    run_to_end(core)


def test_counters(new_core):
    core = new_core(num_blocks=6, max_model_len=80, runner=FakeRunner(16))
    run_one(core, make_request("a", [*PREFIX, 1], max_tokens=2))
    run_one(core, make_request("b", [*PREFIX, 2], max_tokens=2))
    stats = core.stats().kv_cache
    assert (stats.prefix_queries, stats.prefix_hits) == (98, 48)
    assert stats.hit_rate == 48 / 98
    assert (stats.num_blocks, stats.num_free_blocks, stats.usage) == (5, 5, 0.0)
    assert stats.num_evictions == 0
    core.add_request(make_request("c", 60, max_tokens=10))
    core.step()
    stats = core.stats().kv_cache
    assert stats.usage == 0.8
    assert stats.num_evictions == 2  # five blocks, three of them cached, four taken
    run_to_end(core)
