"""All KV blocks, their reference counts, the free queue and the prefix cache's hash table.

    free queue:  front ─▶ [unhashed, last freed first] [hashed, least recently used first] ◀─ back
                 allocate takes from the front; a hashed block taken there is an eviction

A block with references is never in the queue. Block 0 is the null block: padding rows write to
it, it is never handed out. Knows nothing of requests; no torch.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256

from girih.kernels.base.errors import CapacityError, EngineError

NULL_BLOCK_ID = 0
ROOT_HASH = sha256(b"girih prefix cache root 1").digest()


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """SHA-256 of one full block in the chain of its prefix (32 bytes).

    Processes agree on it: the root is fixed and integers have a fixed width and byte order.

    Args:
        parent: hash of the block before, `ROOT_HASH` for the first.
        token_ids: the tokens of the block.
        extra_keys: what else the KV depends on, e.g. the cache salt (first block only).
    """
    content = parent + _packed(token_ids)
    for key in extra_keys:
        encoded = key.encode()
        content += struct.pack("<q", len(encoded)) + encoded
    return sha256(content).digest()


def hash_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """`hash_block` of every block of `token_ids`, each on top of the one before.

    Args:
        parent: hash of the block before the first.
        token_ids: of full blocks.
        block_size: tokens of a block.
    """
    packed, width = _packed(token_ids), 8 * block_size
    hashes = []
    for start in range(0, len(packed), width):
        parent = sha256(parent + packed[start : start + width]).digest()
        hashes.append(parent)
    return hashes


def _packed(token_ids: Sequence[int]) -> bytes:
    """64-bit integers, least significant byte first."""
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class KVBlock:
    """One block of KV slots.

    Attributes:
        block_id: index in the KV tensors.
        ref_count: block tables that hold it; 0 means it is in the free queue.
        block_hash: hash under which the prefix cache finds it, or None.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "previous_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.previous_free: KVBlock | None = None
        self.next_free: KVBlock | None = None

    def __repr__(self) -> str:
        hashed = "hashed" if self.block_hash else "unhashed"
        return f"KVBlock({self.block_id}, refs={self.ref_count}, {hashed})"


class FreeQueue:
    """Doubly linked list of free blocks in eviction order; every operation is O(1)."""

    def __init__(self) -> None:
        self._ends = KVBlock(-1)  # sentinel: next is the front, previous is the back
        self._ends.next_free = self._ends.previous_free = self._ends
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._ends.next_free
        while block is not None and block is not self._ends:
            yield block
            block = block.next_free

    def push_front(self, block: KVBlock) -> None:
        """Make `block` the next one to be handed out."""
        self._insert_after(self._ends, block)

    def push_back(self, block: KVBlock) -> None:
        """Make `block` the last one to be handed out."""
        assert self._ends.previous_free is not None
        self._insert_after(self._ends.previous_free, block)

    def pop_front(self, count: int) -> list[KVBlock]:
        """Take the next `count` blocks, which must be there, in order."""
        taken = []
        block = self._ends.next_free
        for _ in range(count):
            assert block is not None and block is not self._ends, "the free queue is too short"
            taken.append(block)
            following = block.next_free
            block.previous_free = block.next_free = None
            block = following
        assert block is not None
        self._ends.next_free, block.previous_free = block, self._ends
        self._length -= count
        return taken

    def remove(self, block: KVBlock) -> None:
        """Take `block` out of the middle."""
        before, after = block.previous_free, block.next_free
        assert before is not None and after is not None, f"{block} is not in the free queue"
        before.next_free, after.previous_free = after, before
        block.previous_free = block.next_free = None
        self._length -= 1

    def _insert_after(self, before: KVBlock, block: KVBlock) -> None:
        after = before.next_free
        assert after is not None and block.next_free is None, f"{block} is already free"
        before.next_free = after.previous_free = block
        block.previous_free, block.next_free = before, after
        self._length += 1


class BlockPool:
    """Owner of every KV block.

    Args:
        num_blocks: blocks in all, the null block included (at least 2).

    Attributes:
        num_evictions: cached blocks whose content was given up for new tokens.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"the KV cache has {num_blocks} blocks; it needs at least 2 (block 0 is the null "
                "block): raise cache.num_blocks or cache.kv_cache_bytes"
            )
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self.blocks[NULL_BLOCK_ID].ref_count = 1
        self.num_evictions = 0
        self._free = FreeQueue()
        for block in self.blocks[1:]:
            self._free.push_back(block)
        self._cached: dict[bytes, KVBlock] = {}

    @property
    def null_block(self) -> KVBlock:
        """Stands in block tables where a block is not needed; the pool counts no references."""
        return self.blocks[NULL_BLOCK_ID]

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold (all but the null block)."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks without references, cached content or not."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks the prefix cache can find, in use or not."""
        return len(self._cached)

    def allocate(self, num_blocks: int) -> list[KVBlock]:
        """Take blocks for new tokens, one reference each; evicts cached ones when it must.

        Raises:
            CapacityError: fewer than `num_blocks` are free (nothing is taken).
        """
        if num_blocks > len(self._free):
            raise CapacityError(f"{num_blocks} KV blocks asked, {len(self._free)} are free")
        taken = self._free.pop_front(num_blocks)
        for block in taken:
            if block.block_hash is not None:
                del self._cached[block.block_hash]
                block.block_hash = None
                self.num_evictions += 1
            block.ref_count = 1
        return taken

    def add_references(self, blocks: Iterable[KVBlock]) -> None:
        """Let one more block table hold each of `blocks` (revives free cached ones)."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1

    def release(self, blocks: Sequence[KVBlock]) -> None:
        """Drop one reference of each block of a table given in sequence order.

        Works from the tail, so that the tail is evicted before the head: a prefix is useful
        without its continuation, not the other way round.
        """
        for block in reversed(blocks):
            block.ref_count -= 1
            if block.ref_count > 0:
                continue
            if block.ref_count < 0 or block.block_id == NULL_BLOCK_ID:
                raise EngineError(f"{block} was released more often than it was taken")
            if block.block_hash is None:
                self._free.push_front(block)
            else:
                self._free.push_back(block)

    def cache(self, blocks: Sequence[KVBlock], block_hashes: Sequence[bytes]) -> None:
        """Let the prefix cache find `blocks`; where it has an equal block, that one stays.

        The null block stands for a block that was given back, and is left out.
        """
        cached, null = self._cached, self.null_block
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block is null:
                continue
            if block.ref_count == 0:
                raise EngineError(
                    f"{block} is free; only a block in use can enter the prefix cache"
                )
            if block.block_hash is None and block_hash not in cached:
                block.block_hash = block_hash
                cached[block_hash] = block

    def find(self, block_hash: bytes) -> KVBlock | None:
        """The block that holds this content, or None."""
        return self._cached.get(block_hash)

    def find_leading(self, block_hashes: Iterable[bytes]) -> list[KVBlock]:
        """The blocks that hold these contents, up to the first that none holds."""
        found = []
        for block_hash in block_hashes:
            block = self._cached.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def count_free(self, blocks: Iterable[KVBlock]) -> int:
        """Count those of `blocks` that are in the free queue now."""
        return sum(block.ref_count == 0 for block in blocks)

    def forget_cached(self) -> None:
        """Drop every hash; blocks in use keep their content and their references."""
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()

    def check_integrity(self, tables: Iterable[Sequence[KVBlock]]) -> None:
        """Compare the pool with the block tables of all requests.

        Raises:
            EngineError: free + in use != total, a count differs from the tables' references,
                the queue is out of order, or the hash table points at a wrong block.
        """
        references = [0] * len(self.blocks)
        for table in tables:
            for block in table:
                references[block.block_id] += 1
        references[NULL_BLOCK_ID] = 1  # tables may name it any number of times
        for block, expected in zip(self.blocks, references, strict=True):
            if block.ref_count != expected:
                raise EngineError(f"{block} is in {expected} block tables")
        queue = list(self._free)
        in_use = sum(count > 0 for count in references) - 1
        if len(queue) != len(self._free) or len(queue) + in_use != self.num_usable:
            raise EngineError(f"{len(queue)} free + {in_use} in use != {self.num_usable} KV blocks")
        hashed = [block.block_hash is not None for block in queue]
        if any(block.ref_count for block in queue) or hashed != sorted(hashed):
            raise EngineError("the free queue holds a used block, or a hashed before an unhashed")
        self._check_hashes()

    def _check_hashes(self) -> None:
        for block_hash, block in self._cached.items():
            if block.block_hash != block_hash:
                raise EngineError(f"{block} is cached under another hash than its own")
        if sum(block.block_hash is not None for block in self.blocks) != len(self._cached):
            raise EngineError("a block has a hash that the prefix cache does not know")
