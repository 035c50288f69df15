"""Block tables of requests over the block pool, and the prefix cache's rules.

    request.blocks:  [cached hit | own, full and offered to the cache | own, being filled]
                      ╰──────── num_cached_blocks rows ────────╯

A table is a list of rows, one per `block_size` tokens; a row has one block per KV group (flat: row
r of group g is at `r * num_groups + g`). A group that forgets (window, chunks) has the null block
where its block was given back, and in a cached hit where it needs none.

Owns when a block may enter the prefix cache, and when it is given back: only after a result proved
its tokens computed. Writes `blocks`, `block_hashes`, `num_cached_blocks`, `num_released_rows` and
`kv_due` of a `Request`, nothing else of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from girih.kernels.base.errors import EngineError
from girih.kernels.kv.groups import FULL, KVCacheGroup, longest
from girih.runtime.records.request import Request
from girih.runtime.schedule.block_pool import ROOT_HASH, BlockPool, KVBlock, hash_block, hash_chain


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


class PrefixHit(NamedTuple):
    """Cached blocks of the longest known prefix, without references.

    Attributes:
        num_tokens: length of the prefix.
        blocks: its rows, as a block table; the null block where a group needs none.
    """

    num_tokens: int
    blocks: list[KVBlock]


@dataclass(frozen=True)
class _Columns:
    """Neighbouring groups that keep the same part of a context: columns [start, stop) of a row."""

    kind: KVCacheGroup
    start: int
    stop: int


class KVCacheManager:
    """Gives requests KV blocks and takes them back.

    Args:
        num_blocks: blocks in all, the null block included.
        block_size: token slots per block.
        enable_prefix_caching: keep and reuse blocks of equal prefixes.
        groups: the KV groups, those of a kind next to each other; none for a model without
            attention.
        lookahead: tokens of one request in plans whose result is not there, at most.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: Sequence[KVCacheGroup] = (FULL,),
        lookahead: int = 0,
    ):
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching and bool(groups)
        self.groups = tuple(groups)
        self.num_groups = len(groups)
        self.lookahead = lookahead
        self._columns = _columns(groups)
        self._full = [columns for columns in self._columns if columns.kind.is_full]
        self._forgetful = [columns for columns in self._columns if not columns.kind.is_full]
        # The prefix cache's keys are (hash, group); the group is a suffix of the hash.
        self._suffixes = [b"", *(g.to_bytes(2) for g in range(1, self.num_groups))]
        self._holders: dict[str, Request] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest request that fits when it is alone."""
        return longest(self.groups, self.pool.num_usable, self.block_size, self.lookahead)

    def hash_prompt(self, request: Request) -> None:
        """Hash the full blocks of a request that arrived, so that no plan waits for it."""
        if self.enable_prefix_caching:
            self._hash_rows(request, request.num_tokens // self.block_size)

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest prefix that all groups have cached, without taking references.

        A group needs only the blocks that a token after the prefix sees. The block of the last
        token is never part of it: its logits are needed, so at least one token is computed. A
        request that wants prompt logprobs computes its whole prompt.
        """
        if not self.enable_prefix_caching or request.sampling.prompt_logprobs is not None:
            return PrefixHit(0, [])
        limit = (request.num_tokens - 1) // self.block_size
        if self.num_groups == 1 and not self._forgetful:
            blocks = self._leading_blocks(request, limit)
            return PrefixHit(len(blocks) * self.block_size, blocks)
        num_rows = self._common_rows(request, limit)
        return PrefixHit(num_rows * self.block_size, self._hit_table(request, num_rows))

    def _leading_blocks(self, request: Request, limit: int) -> list[KVBlock]:
        """Cached blocks of the only group from the start on."""
        self._hash_rows(request, limit)
        return self.pool.find_leading(request.block_hashes[:limit])

    def _common_rows(self, request: Request, num_rows: int) -> int:
        """Most rows, up to `num_rows`, whose needed blocks are cached in every group.

        Each kind of group lowers the number to what it can offer, until none does.
        """
        for columns in self._full:
            missing = (r for r in range(num_rows) if not self._has_row(columns, request, r))
            num_rows = next(missing, num_rows)
        before = -1
        while num_rows != before:
            before = num_rows
            for columns in self._forgetful:
                num_rows = self._rows_of(columns, request, num_rows)
        return num_rows

    def _rows_of(self, columns: _Columns, request: Request, num_rows: int) -> int:
        """Most rows, up to `num_rows`, that the groups of a forgetful kind can offer."""
        row = num_rows
        while row > self._first_row(columns, num_rows):
            row -= 1
            if not self._has_row(columns, request, row):
                num_rows = row
        return num_rows

    def _has_row(self, columns: _Columns, request: Request, row: int) -> bool:
        block_hash = self._block_hash(request, row)
        suffixes = self._suffixes[columns.start : columns.stop]
        return all(self.pool.find(block_hash + suffix) is not None for suffix in suffixes)

    def _first_row(self, columns: _Columns, num_rows: int) -> int:
        """First row that a token right after `num_rows` rows sees."""
        return columns.kind.first_needed(num_rows * self.block_size) // self.block_size

    def _hit_table(self, request: Request, num_rows: int) -> list[KVBlock]:
        """The block table of a prefix that `_common_rows` found."""
        null = self.pool.null_block
        table = [null] * (num_rows * self.num_groups)
        for columns in self._columns:
            for row in range(self._first_row(columns, num_rows), num_rows):
                block_hash = self._block_hash(request, row)
                for group in range(columns.start, columns.stop):
                    block = self.pool.find(block_hash + self._suffixes[group])
                    assert block is not None, "a block of a prefix hit is not cached"
                    table[row * self.num_groups + group] = block
        return table

    def can_admit(self, request: Request, hit: PrefixHit, num_reserved: int) -> bool:
        """Return whether the whole known sequence fits and leaves `num_reserved` blocks free."""
        num_needed = self._blocks_needed(request.num_tokens, hit)
        num_free = self.pool.num_free - self.pool.count_free(hit.blocks)
        return num_needed + num_reserved <= num_free

    def _blocks_needed(self, num_tokens: int, hit: PrefixHit) -> int:
        """Blocks beside those of `hit` that a sequence of `num_tokens` comes to hold."""
        if not self._forgetful:
            return self._num_rows(num_tokens) * self.num_groups - len(hit.blocks)
        null = self.pool.null_block
        num_held = sum(block is not null for block in hit.blocks)
        num_rows, num_hit_rows = self._num_rows(num_tokens), hit.num_tokens // self.block_size
        needed = 0
        for columns in self._columns:
            rows = num_rows - self._first_row(columns, num_hit_rows)
            most = columns.kind.most_blocks(self.block_size, self.lookahead)
            needed += min(rows, most) * (columns.stop - columns.start)
        return needed - num_held

    def admit(self, request: Request, hit: PrefixHit) -> None:
        """Start the block table of `request` with the cached blocks and count the look-up."""
        self.pool.add_references(self._real(hit.blocks))
        request.blocks = list(hit.blocks)
        num_rows = hit.num_tokens // self.block_size
        request.num_cached_blocks = num_rows
        request.num_released_rows = [self._first_row(c, num_rows) for c in self._forgetful]
        request.kv_due = self._next_due(request)
        self._holders[request.request_id] = request
        if request.num_preemptions == 0:
            self._prefix_queries += request.num_tokens
            self._prefix_hits += hit.num_tokens

    def allocate_slots(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the first `num_tokens` tokens of the sequence: all or nothing.

        Returns:
            Ids of the blocks added to the table, row by row, or None when too few are free.
        """
        num_new = self._num_rows(num_tokens) * self.num_groups - len(request.blocks)
        if num_new <= 0:
            return ()
        if num_new > self.pool.num_free:
            return None
        blocks = self.pool.allocate(num_new)
        request.blocks.extend(blocks)
        return tuple(block.block_id for block in blocks)

    def take_in(self, request: Request, num_computed_tokens: int) -> None:
        """Offer full blocks to the prefix cache and give back those that no later token sees.

        Nothing happens before `request.kv_due` tokens are computed.

        Args:
            request: holds the blocks.
            num_computed_tokens: tokens whose KV a result has proved computed; their ids are
                final (drafts that were not verified do not count).
        """
        if self.enable_prefix_caching:
            self._cache_full_rows(request, num_computed_tokens // self.block_size)
        for place, columns in enumerate(self._forgetful):
            self._release_unseen(request, place, columns, num_computed_tokens)
        request.kv_due = self._next_due(request)

    def _cache_full_rows(self, request: Request, num_full: int) -> None:
        first, width = request.num_cached_blocks, self.num_groups
        if first >= num_full:
            return
        self._hash_rows(request, num_full)
        keys = request.block_hashes[first:num_full]
        if width > 1:
            keys = [block_hash + suffix for block_hash in keys for suffix in self._suffixes]
        self.pool.cache(request.blocks[first * width : num_full * width], keys)
        request.num_cached_blocks = num_full

    def _release_unseen(
        self, request: Request, place: int, columns: _Columns, num_computed_tokens: int
    ) -> None:
        """Give back the rows before what the next token sees, in the groups of one kind."""
        first, width = request.num_released_rows[place], self.num_groups
        stop = columns.kind.first_needed(num_computed_tokens) // self.block_size
        if stop <= first:
            return
        places = [
            row * width + group
            for row in range(first, stop)
            for group in range(columns.start, columns.stop)
        ]
        self.pool.release([request.blocks[i] for i in places])
        for i in places:
            request.blocks[i] = self.pool.null_block
        request.num_released_rows[place] = stop

    def _next_due(self, request: Request) -> int:
        """Computed tokens at which `take_in` has something to do again."""
        due = sys.maxsize
        if self.enable_prefix_caching and request.num_cached_blocks < sys.maxsize:
            due = (request.num_cached_blocks + 1) * self.block_size
        for place, columns in enumerate(self._forgetful):
            row = request.num_released_rows[place]
            due = min(due, columns.kind.unneeded_at((row + 1) * self.block_size))
        return due

    def free(self, request: Request) -> None:
        """Take back every block of `request` (none held: nothing happens)."""
        if self._holders.pop(request.request_id, None) is not None:
            self.pool.release(self._real(request.blocks))
            request.blocks = []
            request.num_cached_blocks = 0

    def _real(self, blocks: list[KVBlock]) -> list[KVBlock]:
        """The entries of a table that hold something."""
        if not self._forgetful:
            return blocks
        null = self.pool.null_block
        return [block for block in blocks if block is not null]

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; what running requests computed so far never enters again."""
        self.pool.forget_cached()
        for request in self._holders.values():
            request.num_cached_blocks = sys.maxsize

    def num_slots(self, request: Request) -> int:
        """Tokens that the block table of `request` has room for."""
        if not self.num_groups:
            return sys.maxsize
        return len(request.blocks) // self.num_groups * self.block_size

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
        """Raise `EngineError` unless the pool agrees with all block tables.

        Also when a table has a block before what its group must keep, or lacks one after that.
        """
        self.pool.check_integrity(request.blocks for request in self._holders.values())
        for request in self._holders.values():
            for place, columns in enumerate(self._forgetful):
                self._check_columns(request, columns, request.num_released_rows[place])

    def _check_columns(self, request: Request, columns: _Columns, num_released: int) -> None:
        null = self.pool.null_block
        for group in range(columns.start, columns.stop):
            table = request.blocks[group :: self.num_groups]
            for row, block in enumerate(table):
                if (block is null) != (row < num_released):
                    raise EngineError(
                        f"{request.request_id!r} has {block} in row {row} of group {group} "
                        f"({columns.kind.as_text()}), which gave back {num_released} rows"
                    )

    def _num_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _block_hash(self, request: Request, index: int) -> bytes:
        """Hash of full row `index`, filled in chain order on demand."""
        if index >= len(request.block_hashes):
            self._hash_rows(request, index + 1)
        return request.block_hashes[index]

    def _hash_rows(self, request: Request, num_rows: int) -> None:
        """Fill the hashes of the first `num_rows` rows, which are full."""
        hashes, size, token_ids = request.block_hashes, self.block_size, request.token_ids
        if not hashes and num_rows:
            salt = (request.cache_salt,) if request.cache_salt else ()
            hashes.append(hash_block(ROOT_HASH, token_ids[:size], salt))
        if len(hashes) < num_rows:
            missing = token_ids[len(hashes) * size : num_rows * size]
            hashes += hash_chain(hashes[-1], missing, size)


def _columns(groups: Sequence[KVCacheGroup]) -> list[_Columns]:
    """Runs of groups of one kind."""
    columns: list[_Columns] = []
    for place, group in enumerate(groups):
        kind = replace(group, layers=())
        if columns and columns[-1].kind == kind:
            columns[-1] = replace(columns[-1], stop=place + 1)
        else:
            columns.append(_Columns(kind, place, place + 1))
    return columns
