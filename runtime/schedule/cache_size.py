"""Sizes the KV cache in blocks (no torch: plain arithmetic over the machine's free memory)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from girih.kernels.base.errors import CapacityError
from girih.kernels.kv.groups import KVCachePlan, KVCacheSpec, one_group, plan_groups
from girih.runtime.records.config import CacheConfig

NULL_BLOCKS = 1


@dataclass(frozen=True)
class CacheSize:
    """The KV cache of an engine.

    Attributes:
        groups: how layers share blocks.
        num_blocks: blocks in the pool, the null block included.
        max_model_len: longest request, in tokens.
    """

    groups: KVCachePlan
    num_blocks: int
    max_model_len: int


@dataclass(frozen=True)
class CacheDemand:
    """Demands of a model and the limits of a step on the KV cache.

    Attributes:
        specs: what each layer with a KV slot keeps.
        max_num_seqs: requests that run together.
        lookahead: tokens of one request in plans whose result is not there, at most.
        state_bytes: what recurrent layers keep for all requests; comes out of the budget.
    """

    specs: Sequence[KVCacheSpec]
    max_num_seqs: int
    lookahead: int = 0
    state_bytes: int = 0


def plan_cache(
    config: CacheConfig, demand: CacheDemand, max_model_len: int, may_shorten: bool = False
) -> CacheSize:
    """Choose the KV groups and the number of blocks.

    `num_blocks` wins over `kv_cache_bytes`, which wins over `memory_fraction` of the free memory.
    No more is taken than `max_num_seqs` requests of the model length can use.

    Args:
        config: what the user asked for.
        demand: what it is for.
        max_model_len: longest request, in tokens.
        may_shorten: take the largest length that fits when this one does not.

    Raises:
        CapacityError: one request of the model length does not fit; says which length would.
    """
    if config.num_blocks is not None:
        budget, origin = 0, f"cache.num_blocks={config.num_blocks}"
    else:
        budget, origin = _budget(config)
    fit = _Fit(config, demand, max(0, budget - demand.state_bytes))
    size = fit.size(max_model_len)
    if size is not None:
        return size
    largest = bisect_right(range(1, max_model_len + 1), False, key=lambda n: fit.size(n) is None)
    shorter = fit.size(largest) if largest else None
    if may_shorten and shorter is not None and largest > 1:
        return shorter
    plan = plan_groups(demand.specs, config.block_size, max_model_len)
    needed = plan.blocks_for(max_model_len, demand.lookahead)
    raise CapacityError(
        f"{origin} gives {max(0, fit.num_blocks(plan) - NULL_BLOCKS)} KV blocks of "
        f"{config.block_size} tokens, but one request of model.max_model_len={max_model_len} "
        f"tokens needs {needed} blocks ({needed * plan.block_bytes / 2**20:.0f} MiB). Raise the "
        "budget" + (f", or set model.max_model_len to at most {largest}" if largest > 1 else "")
    )


@dataclass(frozen=True)
class _Fit:
    """Decides whether requests fit into a budget of bytes, or into a given number of blocks."""

    config: CacheConfig
    demand: CacheDemand
    budget: int

    def num_blocks(self, plan: KVCachePlan) -> int:
        """Blocks that the budget pays."""
        if self.config.num_blocks is not None:
            return self.config.num_blocks
        return self.budget // max(1, plan.block_bytes)

    def size(self, length: int) -> CacheSize | None:
        """The cache for requests of up to `length` tokens; None when one does not fit."""
        specs, block_size = self.demand.specs, self.config.block_size
        for plan in (plan_groups(specs, block_size, length), one_group(specs, block_size)):
            needed, blocks = plan.blocks_for(length, self.demand.lookahead), self.num_blocks(plan)
            if needed > blocks - NULL_BLOCKS:
                continue
            useful = max(needed, 1) * self.demand.max_num_seqs + NULL_BLOCKS
            if self.config.num_blocks is None:
                blocks = min(blocks, useful)
            return CacheSize(plan, blocks, length)
        return None


def _budget(config: CacheConfig) -> tuple[int, str]:
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes, f"cache.kv_cache_bytes={config.kv_cache_bytes}"
    free = available_memory()
    return int(free * config.memory_fraction), (
        f"cache.memory_fraction={config.memory_fraction} of {free / 2**30:.1f} GiB free memory"
    )


def available_memory() -> int:
    """Bytes of memory a new process could use, the container's limit considered."""
    available = 1 << 40
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _read_int(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
