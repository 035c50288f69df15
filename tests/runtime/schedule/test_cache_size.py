"""How many KV blocks are taken, in which groups, and which model length fits."""

from __future__ import annotations

import pytest

from girih.kernels.base.errors import CapacityError, ConfigError
from girih.kernels.kv.groups import KVCacheSpec
from girih.runtime.records.config import CacheConfig
from girih.runtime.schedule import cache_size
from girih.runtime.schedule.cache_size import CacheDemand, plan_cache

FULL = KVCacheSpec(2, 64, 64, 2)  # 512 bytes per token
SLIDING = KVCacheSpec(2, 64, 64, 2, window=512)
LOOKAHEAD = 256


def demand(*specs, num_seqs=4, state_bytes=0):
    return CacheDemand(specs, num_seqs, LOOKAHEAD, state_bytes)


def config(**fields):
    return CacheConfig(block_size=32, **fields)


def test_bytes_become_blocks_and_no_more_than_are_useful():
    size = plan_cache(config(kv_cache_bytes=64 * 32 * 512), demand(FULL), 1024)
    assert (size.num_blocks, size.max_model_len) == (64, 1024)
    size = plan_cache(config(kv_cache_bytes=1 << 30), demand(FULL), 1024)
    assert size.num_blocks == 4 * 32 + 1
    assert plan_cache(config(num_blocks=500), demand(FULL), 1024).num_blocks == 500


def test_states_come_out_of_the_budget():
    budget = config(kv_cache_bytes=64 * 32 * 512)
    size = plan_cache(budget, demand(FULL, state_bytes=8 * 32 * 512), 1024)
    assert size.num_blocks == 56
    assert plan_cache(budget, demand(state_bytes=1000), 1024).groups.groups == ()


def test_the_share_of_free_memory(monkeypatch):
    monkeypatch.setattr(cache_size, "available_memory", lambda: 100 * 32 * 512)
    assert plan_cache(config(memory_fraction=0.5), demand(FULL), 1024).num_blocks == 50


@pytest.mark.parametrize("specs", [[FULL], [FULL, SLIDING, SLIDING], [SLIDING]])
def test_a_length_that_does_not_fit_is_refused_with_the_one_that_does(specs):
    budget = config(kv_cache_bytes=40 * 32 * 512)
    with pytest.raises(CapacityError, match=r"set model.max_model_len to at most") as caught:
        plan_cache(config(kv_cache_bytes=23 * 32 * 512), demand(*specs), 32768)
    largest = int(str(caught.value).split()[-1])
    fits = plan_cache(config(kv_cache_bytes=23 * 32 * 512), demand(*specs), largest)
    assert fits.max_model_len == largest
    with pytest.raises(CapacityError):
        plan_cache(config(kv_cache_bytes=23 * 32 * 512), demand(*specs), largest + 1)
    assert plan_cache(budget, demand(*specs), largest).max_model_len == largest


def test_auto_takes_the_largest_length():
    tight = config(kv_cache_bytes=65 * 32 * 512)
    size = plan_cache(tight, demand(FULL), 32768, may_shorten=True)
    assert (size.max_model_len, size.num_blocks) == (2048, 65)
    assert plan_cache(tight, demand(FULL), 640, may_shorten=True).max_model_len == 640
    # a sliding layer takes 25 blocks at most, a full one the rest
    size = plan_cache(tight, demand(FULL, SLIDING), 32768, may_shorten=True)
    assert size.max_model_len == (64 - 25) * 32
    assert len(size.groups.groups) == 2
    # with nothing but sliding layers any length fits
    assert plan_cache(tight, demand(SLIDING), 32768, may_shorten=True).max_model_len == 32768
    with pytest.raises(CapacityError, match=r"gives 0 KV blocks .* Raise the budget$"):
        plan_cache(config(kv_cache_bytes=0), demand(FULL), 64, may_shorten=True)


def test_windows_longer_than_any_request_are_none():
    size = plan_cache(config(kv_cache_bytes=1 << 26), demand(FULL, SLIDING), 512)
    assert len(size.groups.groups) == 1


def test_what_does_not_fit_apart_may_fit_together():
    """Given blocks hold all layers' tokens when that is what fits."""
    size = plan_cache(config(num_blocks=33), demand(FULL, SLIDING), 1024)
    assert len(size.groups.groups) == 1
    size = plan_cache(config(num_blocks=58), demand(FULL, SLIDING), 1024)
    assert len(size.groups.groups) == 2


def test_cache_dtypes_that_the_cpu_has_not_are_refused():
    assert config(kv_dtype="int8").kv_dtype == "int8"
    with pytest.raises(ConfigError, match="'fp8'; fp8 is for GPUs; it must be one of auto, int8"):
        config(kv_dtype="fp8")
    with pytest.raises(ConfigError, match="'int4'; it must be one of auto, int8"):
        config(kv_dtype="int4")
