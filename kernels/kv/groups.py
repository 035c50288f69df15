"""KV groups: which layers share the blocks of the KV cache, and what each group must keep.

    layers   S S F S S F S S F     (S: sliding window, F: full)
    groups   0 0 2 0 1 2 1 1 2     three layers each: one block holds some tokens of one group

Layers that need the same part of a context form groups of equal size, so that every block has the
same bytes whichever group holds it, and all groups draw from one pool. A group gives back the
blocks that no later token sees. Plain arithmetic; no torch.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_PADDING = 1 / 6  # of the layers of one kind may be padding, so that groups are few
MIN_SAVING = 0.1  # of one request's bytes, else all layers stay in one group


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV cache of one layer.

    Attributes:
        num_kv_heads: key/value heads.
        head_dim: size of a key.
        head_dim_v: size of a value.
        element_bytes: bytes per element.
        scale_bytes: bytes beside each key and each value of a head (quantised caches).
        window: a token sees itself and `window - 1` before it; 0 means no limit.
        chunk: a token sees only its own chunk of this many tokens; 0 means no chunks.
    """

    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    element_bytes: int
    scale_bytes: int = 0
    window: int = 0
    chunk: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        elements = self.head_dim + self.head_dim_v
        return self.num_kv_heads * (elements * self.element_bytes + 2 * self.scale_bytes)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers whose KV lies in the same blocks.

    Attributes:
        layers: their KV slots, at most `KVCachePlan.layers_per_group`.
        window: as in `KVCacheSpec`; 0 keeps everything.
        chunk: as in `KVCacheSpec`.
    """

    layers: tuple[int, ...] = ()
    window: int = 0
    chunk: int = 0

    @property
    def is_full(self) -> bool:
        """True if the whole context is kept."""
        return not self.window and not self.chunk

    def first_needed(self, position: int) -> int:
        """Earliest position that the token at `position`, or one after it, sees."""
        first = max(0, position - self.window + 1) if self.window else 0
        if self.chunk:
            first = max(first, position // self.chunk * self.chunk)
        return first

    def unneeded_at(self, position: int) -> int:
        """First position whose token, as every later one, sees nothing before `position`."""
        if self.is_full:
            return sys.maxsize
        after_window = position + self.window - 1 if self.window else sys.maxsize
        next_chunk = -(-position // self.chunk) * self.chunk if self.chunk else sys.maxsize
        return min(after_window, next_chunk)

    def most_blocks(self, block_size: int, lookahead: int) -> int:
        """Blocks one request holds at most, however long it grows.

        Args:
            block_size: tokens per block.
            lookahead: tokens planned at most beyond those whose KV is known to be computed.
        """
        if self.is_full:
            return sys.maxsize
        behind = min(reach for reach in (self.window, self.chunk) if reach) - 1
        return (behind + lookahead + block_size - 2) // block_size + 1

    def as_text(self) -> str:
        """ "full", "window 512" or "chunks of 8192"."""
        parts = [f"window {self.window}"] if self.window else []
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        return ", ".join(parts) or "full"


FULL = KVCacheGroup()
"""A group that keeps the whole context."""


@dataclass(frozen=True)
class KVCachePlan:
    """The groups of a program.

    Attributes:
        specs: one per layer with a KV slot, in slot order.
        groups: of those layers; every layer is in exactly one. Groups of a kind are neighbours.
        block_size: tokens per block.
    """

    specs: tuple[KVCacheSpec, ...]
    groups: tuple[KVCacheGroup, ...]
    block_size: int

    @property
    def layers_per_group(self) -> int:
        """Layers that a block has room for."""
        return max((len(group.layers) for group in self.groups), default=0)

    @property
    def num_padding(self) -> int:
        """Layers that blocks have room for and that do not exist."""
        return self.layers_per_group * len(self.groups) - len(self.specs)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * max(
            (sum(self.specs[layer].token_bytes for layer in group.layers) for group in self.groups),
            default=0,
        )

    def blocks_for(self, num_tokens: int, lookahead: int) -> int:
        """Blocks that one request of `num_tokens` holds at most.

        Args:
            num_tokens: its length.
            lookahead: see `KVCacheGroup.most_blocks`.
        """
        return blocks_for(self.groups, num_tokens, self.block_size, lookahead)

    def request_bytes(self, num_tokens: int) -> int:
        """Bytes that one request holds while it decodes at this length."""
        return self.blocks_for(num_tokens, 1) * self.block_bytes

    def as_text(self) -> str:
        """Groups, and bytes per token, for people."""
        if not self.groups:
            return "kv groups none\n"
        counts = Counter(group.as_text() for group in self.groups)
        size, padding = self.layers_per_group, self.num_padding
        kinds = "; ".join(f"{n} × {size} layers {kind}" for kind, n in counts.items())
        if len({(spec.window, spec.chunk) for spec in self.specs}) > 1 and len(self.groups) == 1:
            kinds += ", of every kind"
        note = f" ({padding} of them padding)" if padding else ""
        held = self.block_bytes * len(self.groups) // self.block_size
        lasting = self.block_bytes * counts["full"] // self.block_size
        later = f", {lasting} when it is out of every window" if lasting < held else ""
        return f"kv groups {kinds}{note}\nkv bytes  {held} per token{later}\n"

    def as_saving(self, num_tokens: int) -> str:
        """Describe what groups save for one request of `num_tokens`; "" for one group."""
        single = one_group(self.specs, self.block_size).request_bytes(num_tokens)
        if len(self.groups) < 2:
            return ""
        held = self.request_bytes(num_tokens)
        return (
            f"kv saved  {1 - held / single:.0%} of a request of {num_tokens} tokens: "
            f"{held / 2**20:.1f} MiB instead of {single / 2**20:.1f}\n"
        )


def blocks_for(
    groups: Sequence[KVCacheGroup], num_tokens: int, block_size: int, lookahead: int
) -> int:
    """Blocks that one request of `num_tokens` holds at most, over all groups."""
    rows = -(-num_tokens // block_size)
    return sum(min(rows, group.most_blocks(block_size, lookahead)) for group in groups)


def longest(
    groups: Sequence[KVCacheGroup], num_blocks: int, block_size: int, lookahead: int
) -> int:
    """Tokens of the longest request that fits; `sys.maxsize` when length does not matter."""
    if sum(group.most_blocks(block_size, lookahead) for group in groups) <= num_blocks:
        return sys.maxsize
    rows = range(1, num_blocks + 1)  # the blocks needed grow with the rows

    def needed(row: int) -> int:
        return blocks_for(groups, row * block_size, block_size, lookahead)

    return block_size * bisect_right(rows, num_blocks, key=needed)


def one_group(specs: Sequence[KVCacheSpec], block_size: int) -> KVCachePlan:
    """All layers in one group that keeps everything."""
    layers = tuple(range(len(specs)))
    groups = (KVCacheGroup(layers),) if layers else ()
    return KVCachePlan(tuple(specs), groups, block_size)


def plan_groups(specs: Sequence[KVCacheSpec], block_size: int, max_model_len: int) -> KVCachePlan:
    """Sort layers into groups.

    All stay in one group when requests of `max_model_len` tokens would save too little, or when
    layers differ in more than the part of a context they see.

    Args:
        specs: one per layer with a KV slot.
        block_size: tokens per block.
        max_model_len: longest request, in tokens.
    """
    single = one_group(specs, block_size)
    if len({replace(spec, window=0, chunk=0) for spec in specs}) != 1:
        return single
    kinds: dict[tuple[int, ...], list[int]] = {}
    for layer, spec in enumerate(specs):
        kind = tuple(n if n < max_model_len else 0 for n in (spec.window, spec.chunk))
        kinds.setdefault(kind, []).append(layer)
    size = _layers_per_group([len(layers) for layers in kinds.values()])
    groups = tuple(
        KVCacheGroup(tuple(layers[start : start + size]), window, chunk)
        for (window, chunk), layers in sorted(kinds.items())
        for start in range(0, len(layers), size)
    )
    split = KVCachePlan(tuple(specs), groups, block_size)
    before, after = single.request_bytes(max_model_len), split.request_bytes(max_model_len)
    return split if after <= (1 - MIN_SAVING) * before else single


def _layers_per_group(counts: Sequence[int]) -> int:
    """The size that makes the fewest groups without padding any kind much."""
    sizes = [
        size
        for size in range(1, max(counts) + 1)
        if all(-n % size <= MAX_PADDING * n for n in counts)
    ]
    return max(sizes)
