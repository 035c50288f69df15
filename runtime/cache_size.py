"""How many KV blocks to allocate (no torch: plain arithmetic over the machine's free memory)."""

from __future__ import annotations

from girih.kernels.errors import CapacityError
from girih.runtime.config import CacheConfig

NULL_BLOCKS = 1


def plan_cache(
    config: CacheConfig,
    block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    state_bytes: int = 0,
) -> int:
    """Number of blocks in the pool, the null block included.

    `num_blocks` wins over `kv_cache_bytes`, which wins over `memory_fraction` of the free memory.
    No more is taken than `max_num_seqs` requests of the model length can use.

    Args:
        config: what the user asked for.
        block_bytes: bytes of one block over all layers; 0 for a model without attention.
        max_model_len: longest request, in tokens.
        max_num_seqs: requests that run together.
        state_bytes: what recurrent layers keep for all of these; comes out of the budget.

    Raises:
        CapacityError: one request of the model length does not fit; says which length would.
    """
    per_request = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        blocks, origin = config.num_blocks, f"cache.num_blocks={config.num_blocks}"
    else:
        budget, origin = _budget(config)
        useful = per_request * max_num_seqs + NULL_BLOCKS
        blocks = min(max(0, budget - state_bytes) // max(1, block_bytes), useful)
    usable = blocks - NULL_BLOCKS
    if usable < per_request:
        raise CapacityError(
            f"{origin} gives {max(0, usable)} KV blocks of {config.block_size} tokens, but one "
            f"request of model.max_model_len={max_model_len} tokens needs {per_request} blocks "
            f"({per_request * block_bytes / 2**20:.0f} MiB). Raise the budget, or set "
            f"model.max_model_len to at most {max(0, usable) * config.block_size}"
        )
    return blocks


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
