"""Block tables of requests over the block pool, and the prefix cache's rules.

    request.blocks:  [cached hit | own, full and offered to the cache | own, being filled]
                      ╰──────── num_cached_blocks ────────╯

Owns when a block may enter the prefix cache: only after a result proved its tokens computed.
Writes `blocks`, `block_hashes` and `num_cached_blocks` of a `Request`, nothing else of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from girih.runtime.block_pool import ROOT_HASH, BlockPool, KVBlock, hash_block
from girih.runtime.request import Request


class KVCacheStats(msgspec.Struct, frozen=True):
    """Counters of the KV cache.

    Attributes:
        num_blocks: blocks that requests can hold.
        num_free_blocks: blocks without references.
        usage: share of blocks in use, 0 to 1.
        prefix_queries: prompt tokens looked up at first admission.
        prefix_hits: those of them that were found.
        num_evictions: cached blocks given up for new tokens.
    """

    num_blocks: int
    num_free_blocks: int
    usage: float
    prefix_queries: int
    prefix_hits: int
    num_evictions: int

    @property
    def hit_rate(self) -> float:
        """Share of looked-up prompt tokens that were found, 0 to 1."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0


class KVCacheManager:
    """Gives requests KV blocks and takes them back.

    Args:
        num_blocks: blocks in all, the null block included.
        block_size: token slots per block.
        enable_prefix_caching: keep and reuse blocks of equal prefixes.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._holders: dict[str, Request] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request alone could keep in the cache."""
        return self.pool.num_usable * self.block_size

    def get_computed_blocks(self, request: Request) -> list[KVBlock]:
        """Cached blocks of the longest known prefix, without taking references.

        The block of the last token is never part of it: its logits are needed, so at least one
        token is computed. A request that wants prompt logprobs computes its whole prompt.
        """
        found: list[KVBlock] = []
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return found
        for index in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.find(self._block_hash(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def can_admit(self, request: Request, found: Sequence[KVBlock], num_reserved: int) -> bool:
        """Whether the whole known sequence fits and leaves `num_reserved` blocks free."""
        num_needed = self._num_blocks(request.num_tokens) - len(found)
        num_free = self.pool.num_free - self.pool.count_free(found)
        return num_needed + num_reserved <= num_free

    def admit(self, request: Request, found: Sequence[KVBlock]) -> None:
        """Start the block table of `request` with the cached blocks and count the look-up."""
        self.pool.add_references(found)
        request.blocks = list(found)
        request.num_cached_blocks = len(found)
        self._holders[request.request_id] = request
        if request.num_preemptions == 0:
            self._prefix_queries += request.num_tokens
            self._prefix_hits += len(found) * self.block_size

    def allocate_slots(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the first `num_tokens` tokens of the sequence: all or nothing.

        Returns:
            Ids of the blocks added to the table, or None when too few are free.
        """
        num_new = self._num_blocks(num_tokens) - len(request.blocks)
        if num_new <= 0:
            return ()
        if num_new > self.pool.num_free:
            return None
        blocks = self.pool.allocate(num_new)
        request.blocks.extend(blocks)
        return tuple(block.block_id for block in blocks)

    def cache_full_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Offer full blocks to the prefix cache.

        Args:
            request: holds the blocks.
            num_computed_tokens: tokens whose KV a result has proved computed; their ids are
                final (drafts that were not verified do not count).
        """
        if not self.enable_prefix_caching:
            return
        num_full = num_computed_tokens // self.block_size
        for index in range(request.num_cached_blocks, num_full):
            self.pool.cache(request.blocks[index], self._block_hash(request, index))
        request.num_cached_blocks = max(request.num_cached_blocks, num_full)

    def free(self, request: Request) -> None:
        """Take back every block of `request` (none held: nothing happens)."""
        if self._holders.pop(request.request_id, None) is not None:
            self.pool.release(request.blocks)
            request.blocks = []
            request.num_cached_blocks = 0

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; what running requests computed so far never enters again."""
        self.pool.forget_cached()
        for request in self._holders.values():
            request.num_cached_blocks = sys.maxsize

    def stats(self) -> KVCacheStats:
        """Counters up to now."""
        num_usable, num_free = self.pool.num_usable, self.pool.num_free
        return KVCacheStats(
            num_blocks=num_usable,
            num_free_blocks=num_free,
            usage=(num_usable - num_free) / num_usable,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_evictions=self.pool.num_evictions,
        )

    def check_integrity(self) -> None:
        """Raise `EngineError` unless the pool agrees with all block tables."""
        self.pool.check_integrity(request.blocks for request in self._holders.values())

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Hash of full block `index`, filled in chain order on demand."""
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) <= index:
            start = len(hashes) * size
            salt = (request.cache_salt,) if request.cache_salt and not hashes else ()
            parent = hashes[-1] if hashes else ROOT_HASH
            hashes.append(hash_block(parent, request.token_ids[start : start + size], salt))
        return hashes[index]
